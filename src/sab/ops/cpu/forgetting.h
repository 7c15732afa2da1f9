// What a bounded macrostate forgets: the rules of sab/ops/forgetting.py once more.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "products.h"

enum Forget : int64_t { RECENT, MOST_READ, RESERVOIR };  // in the order of sab.config.FORGETS

constexpr int64_t READ = 1 << 24;

// What the microstate of this number draws, from 0 to the number.
inline int64_t drawn(int64_t number) {
    uint64_t bits = 0x5AB + (uint64_t(number) + 1) * 0x9E3779B97F4A7C15u;
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9u;
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EBu;
    return static_cast<int64_t>((bits ^ (bits >> 31)) % (uint64_t(number) + 1));
}

// What one row of a macrostate of at most `most` microstates holds: their slots, oldest first, and how often each was
// read, null where that is not counted.
struct Remembered {
    int32_t *slots;
    int64_t *reads, used, most;

    // Counts a read of this slot.
    void count(int32_t slot) const {
        if (reads != nullptr) reads[std::lower_bound(slots, slots + used, slot) - slots] += READ;
    }

    // Adds the slot of a new microstate; returns the one that is forgotten, which may be the same, or -1.
    int64_t keep(int64_t slot, int64_t number, int64_t forget) {
        if (reads != nullptr) {
            int shift = 0;
            while ((int64_t(1) << shift) < most) shift++;
            for (int64_t i = 0; i < used; i++) reads[i] -= reads[i] >> shift;
        }
        int64_t gone = 0, lost = -1;
        if (used == most) {
            if (forget == MOST_READ) gone = std::min_element(reads, reads + used) - reads;  // the first of equal ones
            if (forget == RESERVOIR) gone = drawn(number);
            if (gone >= most) return slot;
            lost = slots[gone];
            used--;
            memmove(slots + gone, slots + gone + 1, (used - gone) * sizeof *slots);
            if (reads != nullptr) memmove(reads + gone, reads + gone + 1, (used - gone) * sizeof *reads);
        }
        slots[used] = static_cast<int32_t>(slot);
        if (reads != nullptr) reads[used] = READ;
        return lost;
    }

    // The inner products of the keys [slot, d] in these slots with the query.
    template <typename T> void multiply(const T *keys, const T *query, int64_t d, T *scores) const {
        constexpr int64_t lanes = Panel<T>::LANES;
        for (int64_t i = 0; i < used; i += lanes) {
            const T *some[lanes];
            for (int64_t j = 0; j < lanes; j++) some[j] = keys + slots[std::min(i + j, used - 1)] * d;
            multiply_vector(query, some, d, scores + i, std::min(lanes, used - i));
        }
    }
};
