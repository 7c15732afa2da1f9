// Two levels of memory: blocks of slots, each with a key of its own, which bounds the scores of those in it. The rules of
// sab/ops/blocks.py once more.
//
// The key of a block is the largest of each entry over its keys, then the smallest. It is made when the block is full, from
// two blocks of half its size where there are such, and never changes. So there are blocks of all sizes, from the smallest on,
// each twice the one before, and a longer memory reads larger ones.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "products.h"

template <typename T> class Blocks {
    std::vector<T> own, parts;  // `parts`: the positive entries of a query, then the negative ones
    T *keys = nullptr;          // [row, block, 2 d], the blocks of the smallest size first
    int64_t slots = 0, d = 0, smallest = 0;

  public:
    int64_t most_read = 0;

    // How many blocks of all sizes so many slots have.
    static int64_t room(int64_t slots, int64_t smallest) {
        int64_t count = 0;
        for (int64_t size = smallest; size <= slots; size *= 2) count += slots / size;
        return count;
    }

    // In memory from elsewhere, from some row of it on.
    void view(void *its_keys, int64_t row, int64_t room_for, int64_t key_size, int64_t smallest_size, int64_t read) {
        slots = room_for, d = key_size, smallest = smallest_size, most_read = read;
        keys = static_cast<T *>(its_keys) + row * room(slots, smallest) * 2 * d;
        parts.resize(2 * d);
    }
    void resize(int64_t rows, int64_t room_for, int64_t key_size, int64_t smallest_size, int64_t read) {
        own.resize(std::max<int64_t>(rows * room(room_for, smallest_size), 1) * 2 * key_size);
        view(own.data(), 0, room_for, key_size, smallest_size, read);
    }
    bool empty() const { return keys == nullptr; }

    // The size of the blocks of a macrostate with so many microstates.
    int64_t size(int64_t used) const {
        int64_t size = smallest;
        while (16 * size * size <= used) size *= 2;
        return size;
    }

    // Makes the keys of the blocks that a slot is the last one of; `of_row` are all keys of the row, [slot, d].
    void add(int64_t row, int64_t slot, const T *of_row) const {
        for (int64_t size = smallest; (slot + 1) % size == 0; size *= 2) {
            int64_t block = slot / size;
            T *made = at(row, size, block);
            if (size > smallest) {
                const T *half = at(row, size / 2, 2 * block);
                memcpy(made, half, 2 * d * sizeof(T));
                extend(made, half + 2 * d, half + 3 * d);
                continue;
            }
            const T *key = of_row + block * size * d;
            memcpy(made, key, d * sizeof(T)), memcpy(made + d, key, d * sizeof(T));
            for (int64_t i = 1; i < size; i++) extend(made, key + i * d, key + i * d);
        }
    }

    // The scores of the first `count` blocks of this size.
    void score(int64_t row, const T *query, int64_t size, int64_t count, T *scores) {
        for (int64_t j = 0; j < d; j++) parts[j] = std::max(query[j], T(0)), parts[d + j] = std::min(query[j], T(0));
        multiply_unpacked(1, count, 2 * d, parts.data(), 2 * d, at(row, size, 0), 2 * d, scores, count, false);
    }

  private:
    T *at(int64_t row, int64_t size, int64_t block) const {
        for (int64_t smaller = smallest; smaller < size; smaller *= 2) block += slots / smaller;
        return keys + (row * room(slots, smallest) + block) * 2 * d;
    }
    // Widens the bounds of a block by others.
    void extend(T *block, const T *largest, const T *least) const {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            block[j] = largest[j] > block[j] ? largest[j] : block[j];
            block[d + j] = least[j] < block[d + j] ? least[j] : block[d + j];
        }
    }
};
