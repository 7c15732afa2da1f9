// Rough scores of all keys of one row, from keys of one byte an entry. Reading keys is most of the work of a step with a
// long memory, and this reads a quarter. A rough score is within a known error of the true one, so the highest true
// scores are found exactly among the few keys that the rough ones leave (see `Candidates`).
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "products.h"

#if defined(__AVX512VNNI__)
#define SAB_BYTES  // one instruction multiplies 64 bytes with 64 others and adds up every four products
#include <immintrin.h>
#endif

// Its codes, in blocks of KEYS keys, [block, pair of entries, key], the scales of the keys and the facts lie where they are
// given. Where the processor multiplies bytes, a block is [four entries, key].
template <typename T> class Sketch {
  public:
    static constexpr int64_t KEYS = 64, CHUNK = 16;
    // Entries of a key at most: the error grows with them, until rough scores leave too many keys. Slots at
    // least: below, scoring all keys takes no more time.
    static constexpr int64_t LARGEST = 256, FEWEST = VECTOR_BYTES > 16 ? 128 : 256;
    // What is known of all keys together.
    struct Facts {
        float residual = 0, length = 0;  // the longest difference of a key from its code, and the longest key
        float chunk = 0;                 // the longest piece of CHUNK entries of a key's codes
    };

    static int64_t pairs(int64_t d) { return (d + 3) / 4 * 2; }  // of a key's entries, and of others up to a multiple of 4

    Sketch(uint16_t *codes, float *scales, Facts *facts, int64_t d) : codes(codes), scales(scales), facts(facts), d(d) {}

    // Entry j of a key is about its code times the key's scale.
    void add(int64_t slot, const T *key) {
        float largest = 0, square = 0, residual = 0;
        for (int64_t j = 0; j < d; j++) {
            float entry = static_cast<float>(key[j]);
            largest = std::max(largest, std::abs(entry));
            square += entry * entry;
        }
        bool is_finite = square < 1e30f;
        float scale = is_finite ? largest / 127 : 0.0f, inverse = scale > 1e-30f ? 1 / scale : 0.0f;
        uint16_t *block = codes + slot / KEYS * KEYS * pairs(d);
        scales[slot] = scale;
        if (!is_finite) {
            facts->length = std::numeric_limits<float>::infinity();
            for (int64_t j = 0; j < d; j++) put(block, slot % KEYS, j, 0);
            return;
        }
        for (int64_t from = 0; from < d; from += CHUNK) {
            float chunk = 0;
            for (int64_t j = from; j < std::min(from + CHUNK, d); j++) {
                float code = std::min(std::max(std::nearbyint(static_cast<float>(key[j]) * inverse), -127.0f), 127.0f);
                float rest = static_cast<float>(key[j] - T(code * scale));
                put(block, slot % KEYS, j, static_cast<int>(code));
                residual += rest * rest;
                chunk += code * code;
            }
            facts->chunk = std::max(facts->chunk, std::sqrt(chunk));
        }
        facts->length = std::max(facts->length, std::sqrt(square));
        facts->residual = std::max(facts->residual, std::sqrt(residual));
    }

    // Makes the rough scores of the slots up to `end`, in blocks from that of `begin` on, and returns by how much one may be
    // wrong: more than any number where keys or query are not finite, or too small to tell. `out` has room for whole blocks.
    float score(const T *query, int64_t begin, int64_t end, float *out) const {
        QueryCode query_codes[LARGEST + 3] = {};
        float largest_chunk = 0, largest = 0, square = 0;
        for (int64_t from = 0; from < d; from += CHUNK) {
            float chunk = 0;
            int64_t end = std::min(from + CHUNK, d);
#pragma omp simd reduction(+ : chunk) reduction(max : largest)
            for (int64_t j = from; j < end; j++) {
                chunk += static_cast<float>(query[j] * query[j]);
                largest = std::max(largest, std::abs(static_cast<float>(query[j])));
            }
            square += chunk;
            largest_chunk = std::max(largest_chunk, chunk);
        }
        // Of pairs, the sum of a chunk's products has 16 bits and must not overflow. Rounding adds at most sqrt(CHUNK) / 2
        // to the length of a chunk of the query's codes.
        float longest = 32000 / std::max(facts->chunk, 1.0f) - 3, length = std::sqrt(square);
        float scale = BYTES ? largest / 127 : std::sqrt(largest_chunk) / longest;
        float inverse = scale > 1e-30f ? 1 / scale : 0.0f, wrong = 0;
        // Beyond these bounds squares overflow or vanish, and nothing would be known of the error.
        if (!(square < 1e30f && square > 1e-24f && facts->length > 1e-12f)) return std::numeric_limits<float>::infinity();
#pragma omp simd reduction(+ : wrong)
        for (int64_t j = 0; j < d; j++) {
            float code = std::nearbyint(static_cast<float>(query[j]) * inverse);
            float rest = static_cast<float>(query[j]) - code * scale;
            query_codes[j] = static_cast<QueryCode>(static_cast<int16_t>(code));
            wrong += rest * rest;
        }
        for (int64_t first = begin / KEYS * KEYS; first < end; first += KEYS, out += KEYS) {
            block(codes + first * pairs(d), query_codes, out);
#pragma omp simd
            for (int64_t i = 0; i < KEYS; i++) out[i] *= scales[first + i] * scale;
        }
        float rounding = static_cast<float>(2 * d + 32) * std::numeric_limits<float>::epsilon();
        float error = facts->residual * length + (facts->length + facts->residual) * std::sqrt(wrong);
        return 1.01f * (error + rounding * facts->length * length);
    }

  private:
    uint16_t *codes;
    float *scales;
    Facts *facts;
    int64_t d;

#if defined(SAB_BYTES)
    static constexpr bool BYTES = true;
    using QueryCode = int8_t;

    // Writes the code of an entry of a key. It is stored 128 higher, since the instruction takes one factor without a sign.
    static void put(uint16_t *block, int64_t key, int64_t entry, int code) {
        reinterpret_cast<uint8_t *>(block)[(entry / 4 * KEYS + key) * 4 + entry % 4] = static_cast<uint8_t>(code + 128);
    }

    // The inner products of a block of codes with the query's.
    void block(const uint16_t *codes, const int8_t *query, float *out) const {
        constexpr int lanes = 16, vectors = KEYS / lanes;
        int total = 0;
        for (int64_t j = 0; j < d; j++) total += query[j];
        __m512i sums[vectors];
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) sums[i] = _mm512_set1_epi32(-128 * total);
        for (int64_t j = 0; j < d; j += 4, codes += 2 * KEYS) {
            int four;
            memcpy(&four, query + j, sizeof four);
#pragma GCC unroll 4
            for (int i = 0; i < vectors; i++)
                sums[i] = _mm512_dpbusd_epi32(sums[i], _mm512_loadu_si512(codes + i * 2 * lanes), _mm512_set1_epi32(four));
        }
#pragma GCC unroll 4
        for (int i = 0; i < vectors; i++) _mm512_storeu_ps(out + i * lanes, _mm512_cvtepi32_ps(sums[i]));
    }
#else
    static constexpr bool BYTES = false;
    using QueryCode = uint16_t;

    // Writes the code of an entry of a key; those of a pair are written in their order.
    static void put(uint16_t *block, int64_t key, int64_t entry, int code) {
        uint16_t &pair = block[entry / 2 * KEYS + key];
        pair = static_cast<uint16_t>(entry % 2 == 0 ? code + 128 : pair + 256 * code);
    }

    // The inner products of a block of codes with the query's. A pair of codes is the number x = 256 c1 + c0 + 128, so
    // q0 c0 + q1 c1 = q0 x + (q1 - 256 q0) (x >> 8) - 128 q0. All of it wraps around at 16 bits, on the way to a total
    // that fits.
    void block(const uint16_t *pairs, const uint16_t *query, float *out) const {
        constexpr int lanes = VECTOR_BYTES / 2, vectors = KEYS / lanes;
        typedef uint16_t Sums __attribute__((vector_size(VECTOR_BYTES)));
        typedef int16_t Signed __attribute__((vector_size(VECTOR_BYTES)));
        typedef uint16_t Pairs __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
        std::fill(out, out + KEYS, 0.0f);
        for (int64_t from = 0; from < d; from += CHUNK) {
            int64_t end = std::min(from + CHUNK, d);
            uint16_t offset = 0;
            for (int64_t j = from; j < end; j += 2) offset -= 128 * query[j];
            Sums sums[vectors];
#pragma GCC unroll 8
            for (int i = 0; i < vectors; i++) sums[i] = Sums{} + offset;
            for (int64_t j = from; j < end; j += 2, pairs += KEYS) {
                const Pairs *some = reinterpret_cast<const Pairs *>(pairs);
                uint16_t first = query[j], second = query[j + 1] - 256 * first;
#pragma GCC unroll 8
                for (int i = 0; i < vectors; i++) sums[i] += first * some[i] + second * (Sums)((Signed)some[i] >> 8);
            }
            int16_t totals[KEYS];
            memcpy(totals, sums, sizeof totals);
#pragma omp simd
            for (int64_t i = 0; i < KEYS; i++) out[i] += totals[i];
        }
    }
#endif
};

// The sketches of several rows. A row's first key may be another than that of slot 0: `begin` counts those before it.
template <typename T> class Sketches {
    static constexpr int64_t KEYS = Sketch<T>::KEYS;
    using Facts = typename Sketch<T>::Facts;
    std::vector<uint16_t> own_codes;
    std::vector<float> own_scales;
    static inline thread_local std::vector<float> of_thread;  // as the buffers of a Selector
    std::vector<float> &rough = of_thread;
    std::vector<Facts> own_facts;
    uint16_t *codes = nullptr;
    float *scales = nullptr;
    Facts *facts = nullptr;
    int64_t room = 0, d = 0, begin = 0;

  public:
    // In memory from elsewhere, from some row of it on, with room for so many slots of each.
    void view(void *its_codes, void *its_scales, void *its_facts, int64_t row, int64_t slots, int64_t key_size,
              int64_t first) {
        room = (slots + KEYS - 1) / KEYS * KEYS, d = key_size, begin = first;
        codes = static_cast<uint16_t *>(its_codes) + row * room * Sketch<T>::pairs(d);
        scales = static_cast<float *>(its_scales) + row * room;
        facts = static_cast<Facts *>(its_facts) + row;
        if (static_cast<int64_t>(rough.size()) < room) rough.resize(room);
    }
    void resize(int64_t rows, int64_t slots, int64_t key_size) {
        int64_t padded = (slots + KEYS - 1) / KEYS * KEYS;
        own_codes.resize(rows * padded * Sketch<T>::pairs(key_size)), own_scales.resize(rows * padded), own_facts.resize(rows);
        view(own_codes.data(), own_scales.data(), own_facts.data(), 0, slots, key_size, 0);
    }
    bool empty() const { return codes == nullptr; }
    void add(int64_t row, int64_t slot, const T *key) const { of(row).add(begin + slot, key); }
    // The rough scores of the first slots of a row, and by how much they may be wrong.
    const float *score(int64_t row, const T *query, int64_t used, float &error) {
        error = of(row).score(query, begin, begin + used, rough.data());
        return rough.data() + begin % KEYS;
    }

  private:
    Sketch<T> of(int64_t row) const { return {codes + row * room * Sketch<T>::pairs(d), scales + row * room, facts + row, d}; }
};
