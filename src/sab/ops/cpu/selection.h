// The k_top highest of one row's scores, highest first; of equal ones the older comes first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "blocks.h"
#include "products.h"
#include "sketch.h"

// The k_top highest scores so far with their slots, highest first.
template <typename T> struct Best {
    int64_t k_top;
    T *scores;
    int32_t *slots;
    int64_t found = 0;

    // A new score comes after those it equals, which are older.
    void insert(T score, int64_t slot) {
        if (found == k_top && !(score > scores[found - 1])) return;
        int64_t place = found < k_top ? found++ : found - 1;
        for (; place > 0 && score > scores[place - 1]; place--) {
            scores[place] = scores[place - 1];
            slots[place] = slots[place - 1];
        }
        scores[place] = score;
        slots[place] = static_cast<int32_t>(slot);
    }
};

// The slots of scores that may be among the highest, in their order: few of many, without a branch for each.
class Candidates {
  public:
    static constexpr int64_t GROUPS = 16;
    std::vector<int32_t> slots;
    int64_t count = 0;

    // Takes the slots of all scores that are at most `slack` below a number which the k_top-th highest score reaches: the
    // k_top-th of the highest ones of 16 groups. If there are few, it takes all. Returns false where this does not work:
    // more than half are candidates, there are fewer groups than k_top, or not all scores are finite.
    template <typename T> bool find(const T *scores, int64_t total, int64_t k_top, T slack) {
        if (static_cast<int64_t>(slots.size()) < total + 16) slots.resize(2 * total + 16), flags.resize(2 * total + 16);
        using Vector = typename Panel<T>::Vector;
        constexpr int64_t lanes = Panel<T>::LANES, vectors = GROUPS / lanes;
        bool takes_all = total <= 2 * GROUPS;
        if (!takes_all && k_top > GROUPS) return false;
        int64_t whole = takes_all ? 0 : total / GROUPS * GROUPS;
        T highest[GROUPS] = {}, least = 0;
        std::copy(scores, scores + std::min(total, GROUPS), highest);
        Vector top[vectors], zeros[vectors] = {};
        memcpy(top, highest, sizeof top);
        for (int64_t slot = 0; slot < whole; slot += GROUPS) {
            const Vector *some = reinterpret_cast<const Vector *>(scores + slot);
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) {
                top[i] = some[i] > top[i] ? some[i] : top[i];
                zeros[i] += some[i] - some[i];  // NaN from a score that is not finite
            }
        }
        T rest = 0;
        for (int64_t j = 0; j < GROUPS; j++) rest += zeros[j / lanes][j % lanes], highest[j] = top[j / lanes][j % lanes];
        for (int64_t slot = whole; slot < total; slot++) {
            rest += scores[slot] - scores[slot];
            if (!takes_all) highest[slot - whole] = std::max(highest[slot - whole], scores[slot]);
        }
        if (rest != 0) return false;
        count = 0;
        if (takes_all) {
            for (; count < total; count++) slots[count] = static_cast<int32_t>(count);
            return true;
        }
        int32_t ranks[GROUPS];
        rank<T, GROUPS>(highest, GROUPS, ranks);
        for (int64_t j = 0; j < GROUPS; j++)
            if (ranks[j] == k_top - 1) least = highest[j] - slack;
#if defined(__AVX512F__)
        if constexpr (std::is_same_v<T, float>) return list(scores, total, least);
#endif
        uint8_t *is_high = flags.data();
#pragma omp simd
        for (int64_t slot = 0; slot < total; slot++) is_high[slot] = scores[slot] >= least;
        std::fill_n(is_high + total, 8, uint8_t(0));
        for (int64_t slot = 0; slot < total; slot += 8) {
            uint64_t any;
            memcpy(&any, is_high + slot, sizeof any);
            if (any == 0) continue;
            if (count > total / 2) return false;
            for (int64_t j = slot; j < slot + 8; j++) {
                slots[count] = static_cast<int32_t>(j);
                count += is_high[j];
            }
        }
        return true;
    }

    // The highest of the candidates, whose scores are given in their order.
    template <typename T> void choose(const T *scores, Best<T> &best) const {
        constexpr int64_t few = 64;
        if (count > few) {
            for (int64_t i = 0; i < count; i++) best.insert(scores[i], slots[i]);
            return;
        }
        int32_t ranks[few];
        if (count <= 32)
            rank<T, 32>(scores, count, ranks);
        else
            rank<T, few>(scores, count, ranks);
        for (int64_t i = 0; i < count; i++)
            if (ranks[i] < best.k_top) best.scores[ranks[i]] = scores[i], best.slots[ranks[i]] = slots[i];
        best.found = std::min(best.k_top, count);
    }

  private:
    std::vector<uint8_t> flags;

#if defined(__AVX512F__)
    // Takes the slots of all scores from `least` on, 16 at a time. Returns false if more than half are.
    bool list(const float *scores, int64_t total, float least) {
        const __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        for (int64_t slot = 0; slot < total; slot += 16) {
            __mmask16 there = _cvtu32_mask16(total - slot >= 16 ? 0xffff : (1u << (total - slot)) - 1);
            __m512 some = _mm512_maskz_loadu_ps(there, scores + slot);
            __mmask16 high = _mm512_mask_cmp_ps_mask(there, some, _mm512_set1_ps(least), _CMP_GE_OQ);
            if (high == 0) continue;
            if (count > total / 2) return false;
            __m512i numbers = _mm512_add_epi32(first, _mm512_set1_epi32(static_cast<int>(slot)));
            _mm512_storeu_si512(&slots[count], _mm512_maskz_compress_epi32(high, numbers));
            count += __builtin_popcount(high);
        }
        return true;
    }
#endif

    // How many of `total` numbers come before each: those that are higher, and those that are equal and older. The
    // numbers have room for `room`.
    template <typename T, int64_t room> static void rank(const T *numbers, int64_t total, int32_t *ranks) {
        T all[room] = {};
        std::copy(numbers, numbers + total, all);
        int32_t before[room] = {};
        for (int64_t j = 0; j < total; j++) {
            T one = all[j];
#pragma omp simd
            for (int64_t i = 0; i < room; i++)
                before[i] += (one > all[i]) | ((one == all[i]) & (static_cast<int32_t>(i) > static_cast<int32_t>(j)));
        }
        std::copy(before, before + total, ranks);
    }
};

// Selects for the rows of a pass, one at a time.
template <typename T> class Selector {
    // Of the thread, from pass to pass: with a million slots, fresh memory takes longer than a step of a stream.
    static inline thread_local Candidates of_thread;
    static inline thread_local std::vector<T> room;
    Candidates &candidates;
    std::vector<T> of_blocks;  // the scores of the blocks that are read, and below which ones these are
    std::vector<int32_t> read;

  public:
    Sketches<T> sketches;  // empty unless it is given room: then keys are to be added
    Blocks<T> blocks;      // the same
    std::vector<T> &scores;  // of all slots of the present row; `select` may change them unless it is told to keep them

    explicit Selector(int64_t slots) : candidates(of_thread), scores(room) {
        if (static_cast<int64_t>(room.size()) < slots) room.resize(slots + slots / 4);
    }

    // By the scores of the first `used` slots.
    void select(int64_t used, Best<T> &best, bool keeps_scores) {
        if (keeps_scores || !candidates.find(scores.data(), used, best.k_top, T(0))) {
            for (int64_t slot = 0; slot < used; slot++) best.insert(scores[slot], slot);
            return;
        }
        for (int64_t i = 0; i < candidates.count; i++) scores[i] = scores[candidates.slots[i]];  // slots[i] >= i
        candidates.choose(scores.data(), best);
    }

    // By the inner products of the keys [used, d] with the query. Returns how many of them were computed.
    int64_t select_by_product(int64_t row, const T *keys, const T *query, int64_t used, int64_t d, Best<T> &best,
                              bool keeps_scores) {
        if (find_by_sketch(row, query, used, best.k_top)) {
            constexpr int64_t lanes = Panel<T>::LANES;
            for (int64_t i = 0; i < candidates.count; i += lanes) {
                const T *some[lanes];
                for (int64_t j = 0; j < lanes; j++)
                    some[j] = keys + candidates.slots[std::min(i + j, candidates.count - 1)] * d;
                multiply_vector(query, some, d, &scores[i], std::min(lanes, candidates.count - i));
            }
            candidates.choose(scores.data(), best);
            return candidates.count;
        }
        multiply_unpacked(1, used, d, query, d, keys, d, scores.data(), used, false);
        select(used, best, keeps_scores);
        return used;
    }

    // The same among the slots of the best blocks and of the last one alone.
    void select_by_blocks(int64_t row, const T *keys, const T *query, int64_t used, int64_t d, Best<T> &best) {
        int64_t size = blocks.size(used), last = (used - 1) / size;
        int64_t scored = std::max(last, std::min((blocks.most_read + 1) * size, used));  // of blocks, then of slots
        if (static_cast<int64_t>(scores.size()) < scored) scores.resize(2 * scored);
        if (last <= blocks.most_read) {
            select_by_product(row, keys, query, used, d, best, false);
            return;
        }
        blocks.score(row, query, size, last, scores.data());
        of_blocks.resize(blocks.most_read), read.resize(blocks.most_read + 1);
        Best<T> best_blocks{blocks.most_read, of_blocks.data(), read.data()};
        select(last, best_blocks, false);
        read.back() = static_cast<int32_t>(last);
        std::sort(read.begin(), read.end());  // of equal scores the older comes first
        int64_t total = 0;
        for (int64_t block : read) {
            int64_t count = std::min(size, used - block * size);
            multiply_unpacked(1, count, d, query, d, keys + block * size * d, d, &scores[total], count, false);
            total += count;
        }
        select(total, best, false);
        for (int64_t i = 0; i < best.found; i++)
            best.slots[i] = static_cast<int32_t>(read[best.slots[i] / size] * size + best.slots[i] % size);
    }

  private:
    // The k_top-th highest score is at least the k_top-th rough one less the error, so whoever reaches that has a rough
    // score of at most twice the error less.
    bool find_by_sketch(int64_t row, const T *query, int64_t used, int64_t k_top) {
        if (sketches.empty() || used < Sketch<T>::FEWEST) return false;
        float error;
        const float *rough = sketches.score(row, query, used, error);
        return error < std::numeric_limits<float>::max() && candidates.find(rough, used, k_top, 2 * error);
    }
};
