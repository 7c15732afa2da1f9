// Matrix products with weights that are packed into panels: beforehand where many products follow, else on the way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#define SAB_BFLOAT16
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int VECTOR_BYTES = 64, ROWS = 8, VECTORS = 3;
#elif defined(__AVX__)
constexpr int VECTOR_BYTES = 32, ROWS = 6, VECTORS = 2;
#else
constexpr int VECTOR_BYTES = 16, ROWS = 4, VECTORS = 2;
#endif

template <typename T> struct Panel {
    typedef T Vector __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
    static constexpr int LANES = VECTOR_BYTES / sizeof(T), COLUMNS = LANES * VECTORS;
};

// Two vectors as one, with the lanes of the list; those of b are counted on from those of a.
template <typename Vector, int... lane> Vector shuffled(Vector a, Vector b, std::integer_sequence<int, lane...>) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, lane...);
#else
    return __builtin_shuffle(a, b, decltype(a == b){lane...});
#endif
}
// Lists of lanes: a0 b0 a1 b1 ... of the first or second halves, and every other one of both.
template <int... lane> constexpr auto interleaved(std::integer_sequence<int, lane...>, std::integer_sequence<int, 0>) {
    return std::integer_sequence<int, (lane / 2 + lane % 2 * int(sizeof...(lane)))...>{};
}
template <int... lane> constexpr auto interleaved(std::integer_sequence<int, lane...>, std::integer_sequence<int, 1>) {
    constexpr int lanes = sizeof...(lane);
    return std::integer_sequence<int, (lanes / 2 + lane / 2 + lane % 2 * lanes)...>{};
}
template <int first, int... lane> constexpr auto alternate(std::integer_sequence<int, lane...>) {
    return std::integer_sequence<int, (2 * lane + first)...>{};
}
template <typename T> using Lanes = std::make_integer_sequence<int, Panel<T>::LANES>;

// A square of the matrix B, as many rows as a vector has lanes, as its transpose.
template <typename T> void transpose_square(const T *b, int64_t b_stride, T *out, int64_t out_stride) {
    using Vector = typename Panel<T>::Vector;
    constexpr int lanes = Panel<T>::LANES;
    Vector rows[lanes], mixed[lanes];
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) rows[i] = *reinterpret_cast<const Vector *>(b + i * b_stride);
#pragma GCC unroll 4
    for (int size = 1; size < lanes; size *= 2) {  // each turn doubles the pieces that are in place
#pragma GCC unroll 8
        for (int i = 0; i < lanes / 2; i++) {
            mixed[2 * i] = shuffled(rows[i], rows[i + lanes / 2], interleaved(Lanes<T>{}, std::integer_sequence<int, 0>{}));
            mixed[2 * i + 1] =
                shuffled(rows[i], rows[i + lanes / 2], interleaved(Lanes<T>{}, std::integer_sequence<int, 1>{}));
        }
#pragma GCC unroll 16
        for (int i = 0; i < lanes; i++) rows[i] = mixed[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < lanes; i++) *reinterpret_cast<Vector *>(out + i * out_stride) = rows[i];
}

// B [K, N] (or its transpose), whose rows are `stride` apart, in panels of COLUMNS columns, [panel, K, COLUMNS]; the last
// one is as many vectors wide as its columns need and filled up with zeros.
template <typename T>
void pack(const T *b, int64_t stride, int64_t k_size, int64_t n_size, bool transposed, T *packed) {
    constexpr int64_t columns = Panel<T>::COLUMNS, lanes = Panel<T>::LANES;
    for (int64_t first = 0; first < n_size; first += columns, packed += columns * k_size) {
        int64_t used = std::min(columns, n_size - first), width = (used + lanes - 1) / lanes * lanes;
        if (used < width) std::fill(packed, packed + width * k_size, T(0));
        if (!transposed) {
            for (int64_t k = 0; k < k_size; k++) {
                const T *from = b + k * stride + first;
                if (used == columns)
                    memcpy(packed + k * width, from, columns * sizeof(T));  // of a size that is known
                else
                    memcpy(packed + k * width, from, used * sizeof(T));
            }
            continue;
        }
        for (int64_t j = 0; j < used; j += lanes)
            for (int64_t k = 0; k < k_size; k += lanes) {
                const T *from = b + (first + j) * stride + k;
                T *to = packed + k * width + j;
                if (j + lanes <= used && k + lanes <= k_size) {
                    transpose_square(from, stride, to, width);
                    continue;
                }
                for (int64_t row = 0; row < std::min(lanes, used - j); row++)
                    for (int64_t i = 0; i < std::min(lanes, k_size - k); i++) to[i * width + row] = from[row * stride + i];
            }
    }
}

// Two numbers of a factor that follow each other along the inner dimension, as bfloat16, the first in the lower half. One
// instruction multiplies 16 pairs with 16 others and adds both products to 16 sums in single precision.
using Pair = uint32_t;

inline int64_t pairs_of(int64_t size) { return (size + 1) / 2; }
// Whether products of numbers of a type can be made of pairs.
#if defined(SAB_BFLOAT16)
template <typename T> constexpr bool CAN_ROUND = std::is_same_v<T, float>;
#else
template <typename T> constexpr bool CAN_ROUND = false;
#endif

// What the entries of two factors, numbers or pairs, add to a vector of sums.
template <typename P> struct Factor {
    using Vector = typename Panel<P>::Vector;
    static void add(Vector &sum, P a, Vector b) { sum += a * b; }
};
#if defined(SAB_BFLOAT16)
template <> struct Factor<Pair> {
    using Vector = typename Panel<float>::Vector;
    static void add(Vector &sum, Pair a, Panel<Pair>::Vector b) {
        sum = (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
};

inline __m512 load_up_to_16(const float *from, int64_t count) {
    return _mm512_maskz_loadu_ps(_cvtu32_mask16(count >= 16 ? 0xffff : (1u << std::max<int64_t>(count, 0)) - 1), from);
}
// The pairs of a row of numbers; `out` has room for a multiple of 16.
inline void pairs_along(const float *from, int64_t size, Pair *out) {
    for (int64_t i = 0; i < size; i += 32)
        _mm512_storeu_si512(out + i / 2, (__m512i)_mm512_cvtne2ps_pbh(load_up_to_16(from + i + 16, size - i - 16), load_up_to_16(from + i, size - i)));
}
// The pairs of two rows, one above the other; null for a second row of zeros. `out` has room for a multiple of 8.
inline void pairs_across(const float *first, const float *second, int64_t size, Pair *out) {
    for (int64_t i = 0; i < size; i += 8) {
        __mmask8 mask = _cvtu32_mask8(size - i >= 8 ? 0xff : (1u << (size - i)) - 1);
        auto widened = [&](const float *row) {
            return _mm256_cvtepu16_epi32((__m128i)_mm256_cvtneps_pbh(_mm256_maskz_loadu_ps(mask, row + i)));
        };
        __m256i above = second == nullptr ? _mm256_setzero_si256() : _mm256_slli_epi32(widened(second), 16);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(out + i), _mm256_or_si256(widened(first), above));
    }
}
// `pack` for a right factor in pairs: [panel, K / 2, COLUMNS].
inline void pack(const float *b, int64_t stride, int64_t k_size, int64_t n_size, bool transposed, Pair *packed) {
    constexpr int64_t columns = Panel<Pair>::COLUMNS, lanes = Panel<Pair>::LANES;
    static thread_local std::vector<float> panel;
    panel.resize(columns * k_size);
    for (int64_t first = 0; first < n_size; first += columns) {
        int64_t used = std::min(columns, n_size - first), width = (used + lanes - 1) / lanes * lanes;
        pack(b + first * (transposed ? stride : 1), stride, k_size, used, transposed, panel.data());
        for (int64_t k = 0; k < k_size; k += 2, packed += width)
            pairs_across(&panel[k * width], k + 1 < k_size ? &panel[(k + 1) * width] : nullptr, width, packed);
    }
}
#endif

// The left factor A of a product as it is, and ROWS rows of one that are packed, [K, ROWS].
template <typename P> struct Plain {
    using Entry = P;
    const P *at;
    int64_t stride;

    P entry(int64_t row, int64_t k) const { return at[row * stride + k]; }
    Plain from(int64_t row) const { return {at + row * stride, stride}; }
};
template <typename P> struct Tile {
    using Entry = P;
    const P *at;

    P entry(int64_t row, int64_t k) const { return at[k * ROWS + row]; }
    Tile from(int64_t row) const { return {at + row}; }
};

// Some rows of C (+)= A B for a panel of B that is `vectors` wide.
template <typename P, int rows, int vectors, typename Left, typename T>
void multiply_block(Left a, const P *panel, int64_t k_size, T *c, int64_t c_stride, int64_t columns, bool accumulate) {
    using Vector = typename Panel<T>::Vector;
    constexpr int width = vectors * Panel<T>::LANES;
    Vector sums[rows][vectors] = {};
    for (int64_t k = 0; k < k_size; k++, panel += width) {
        const auto *b = reinterpret_cast<const typename Panel<P>::Vector *>(panel);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) Factor<P>::add(sums[row][j], a.entry(row, k), b[j]);
    }
    if (columns == width) {
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++) {
            Vector *out = reinterpret_cast<Vector *>(c + row * c_stride);
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) out[j] = accumulate ? out[j] + sums[row][j] : sums[row][j];
        }
        return;
    }
    T values[rows][width];
    memcpy(values, sums, sizeof values);
    for (int row = 0; row < rows; row++)
        for (int64_t j = 0; j < columns; j++)
            c[row * c_stride + j] = accumulate ? c[row * c_stride + j] + values[row][j] : values[row][j];
}

// The same for all m rows of A, or where m is less than `rows` for those.
template <typename P, int rows, int vectors, typename Left, typename T>
void multiply_rows(int64_t m, Left a, const P *panel, int64_t k_size, T *c, int64_t c_stride, int64_t columns,
                   bool accumulate) {
    int64_t row = 0;
    for (; row + rows <= m; row += rows)
        multiply_block<P, rows, vectors>(a.from(row), panel, k_size, c + row * c_stride, c_stride, columns, accumulate);
    if constexpr (rows > 1)
        if (row < m)
            multiply_rows<P, rows - 1, vectors>(m - row, a.from(row), panel, k_size, c + row * c_stride, c_stride,
                                                columns, accumulate);
}

// The same for a panel of any width up to `vectors`.
template <typename P, int vectors, typename... Rest>
void multiply_panel(int64_t width, int64_t m, const Rest &...rest) {
    if (width == vectors * Panel<P>::LANES)
        multiply_rows<P, ROWS, vectors>(m, rest...);
    else if constexpr (vectors > 1)
        multiply_panel<P, vectors - 1>(width, m, rest...);
}

// C [M, N] (+)= A [M, K] B [K, N], B packed, both of numbers or of pairs.
template <typename Left, typename T>
void multiply(int64_t m_size, int64_t n_size, int64_t k_size, Left a, const void *packed, T *c, int64_t c_stride,
              bool accumulate) {
    using P = typename Left::Entry;
    constexpr int64_t columns = Panel<P>::COLUMNS, lanes = Panel<P>::LANES;
    const P *panel = static_cast<const P *>(packed);
    for (int64_t first = 0; first < n_size; first += columns, panel += columns * k_size) {
        int64_t used = std::min(columns, n_size - first);
        multiply_panel<P, VECTORS>((used + lanes - 1) / lanes * lanes, m_size, a, panel, k_size, c + first, c_stride,
                                   used, accumulate);
    }
}

#if defined(SAB_BFLOAT16)
// The same with A as it is, which is rounded to pairs on the way, and B packed in pairs.
inline void multiply_rounded(int64_t m_size, int64_t n_size, int64_t k_size, const float *a, int64_t a_stride,
                             const void *packed, float *c, int64_t c_stride, bool accumulate) {
    static thread_local std::vector<Pair> left;
    int64_t stride = (k_size + 31) / 32 * 16;
    left.resize(m_size * stride);
    for (int64_t row = 0; row < m_size; row++) pairs_along(a + row * a_stride, k_size, &left[row * stride]);
    multiply(m_size, n_size, pairs_of(k_size), Plain<Pair>{left.data(), stride}, packed, c, c_stride, accumulate);
}
#endif

// Rows `first` to `last` of C [M, N] = A^T B for A [K, M], whose rows are `a_stride` apart, and B [K, N], as gradients of
// weights are: K is large. Pieces of both factors are packed on the way, as numbers or pairs P, so that they stay in the
// core's cache.
template <typename P, typename T>
void multiply_transposed(int64_t first, int64_t last, int64_t n_size, int64_t k_size, const T *a, int64_t a_stride,
                         const T *b, T *c) {
    constexpr int64_t depth = 256, width = 5 * Panel<T>::COLUMNS, height = 8 * ROWS, AHEAD = 16;
    constexpr int64_t each = std::is_same_v<P, T> ? 1 : 2;  // rows that an entry of a packed piece is of
    static thread_local std::vector<P> left, right;
    left.resize(height * depth), right.resize(depth * width);
    if (k_size == 0) std::fill(c + first * n_size, c + last * n_size, T(0));
    for (int64_t j = 0; j < n_size; j += width)
        for (int64_t k = 0; k < k_size; k += depth) {
            int64_t deep = std::min(depth, k_size - k), wide = std::min(width, n_size - j);
            pack(b + k * n_size + j, n_size, deep, wide, false, right.data());
            for (int64_t row = first; row < last; row += height) {
                int64_t high = std::min<int64_t>(height, last - row);
                for (int64_t i = 0; i < deep; i += each) {
                    const T *from = a + (k + i) * a_stride + row;
                    for (int64_t next = AHEAD; next < AHEAD + each; next++)  // no prefetcher follows such a stride
                        for (int64_t line = 0; line < high; line += 64 / int64_t(sizeof(T)))
                            __builtin_prefetch(from + next * a_stride + line);
                    for (int64_t tile = 0; tile < high; tile += ROWS) {
                        P *to = &left[tile * depth + i / each * ROWS];
                        int64_t some = std::min<int64_t>(ROWS, high - tile);
                        if constexpr (each == 2)
                            pairs_across(from + tile, i + 1 < deep ? from + tile + a_stride : nullptr, some, to);
                        else if (some == ROWS)
                            memcpy(to, from + tile, ROWS * sizeof(T));  // of a size that is known
                        else
                            memcpy(to, from + tile, some * sizeof(T));
                    }
                }
                for (int64_t tile = 0; tile < high; tile += ROWS)
                    multiply(std::min<int64_t>(ROWS, high - tile), wide, (deep + each - 1) / each,
                             Tile<P>{&left[tile * depth]}, right.data(), c + (row + tile) * n_size + j, n_size, k > 0);
            }
        }
}

// The sum of each of `count` vectors, as many as there are lanes, in their order.
template <typename T, int count> typename Panel<T>::Vector sums_of(typename Panel<T>::Vector *vectors) {
    if constexpr (count == 1) {
        return vectors[0];
    } else {
#pragma GCC unroll 8
        for (int i = 0; i < count / 2; i++)  // sums of neighbours: a0 + a1, a2 + a3, ..., b0 + b1, ...
            vectors[i] = shuffled(vectors[2 * i], vectors[2 * i + 1], alternate<0>(Lanes<T>{})) +
                         shuffled(vectors[2 * i], vectors[2 * i + 1], alternate<1>(Lanes<T>{}));
        return sums_of<T, count / 2>(vectors);
    }
}

// out = the sum of `count` vectors times their factors: a few lanes at a time, which stay in registers.
template <typename T, typename Row>
void sum_scaled(T *out, const T *factors, const Row &row, int64_t count, int64_t size) {
    using Vector = typename Panel<T>::Vector;
    constexpr int64_t lanes = Panel<T>::LANES, vectors = 4;
    int64_t j = 0;
    for (; j + vectors * lanes <= size; j += vectors * lanes) {
        Vector sums[vectors] = {};
        for (int64_t i = 0; i < count; i++) {
            const Vector *some = reinterpret_cast<const Vector *>(row(i) + j);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) sums[v] += factors[i] * some[v];
        }
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) reinterpret_cast<Vector *>(out + j)[v] = sums[v];
    }
    if (j == size) return;
    std::fill(out + j, out + size, T(0));
    for (int64_t i = 0; i < count; i++) {
        const T *some = row(i);
#pragma omp simd
        for (int64_t rest = j; rest < size; rest++) out[rest] += factors[i] * some[rest];
    }
}

// The inner products of a [K] with as many rows as a vector has lanes, of which the first n_size go to c or are added.
template <typename T>
void multiply_vector(const T *a, const T *const *rows, int64_t k_size, T *c, int64_t n_size, bool accumulate = false) {
    using Vector = typename Panel<T>::Vector;
    constexpr int lanes = Panel<T>::LANES;
    Vector sums[lanes] = {};
    int64_t k = 0;
    for (; k + lanes <= k_size; k += lanes) {
        Vector part = *reinterpret_cast<const Vector *>(a + k);
#pragma GCC unroll 16
        for (int j = 0; j < lanes; j++) sums[j] += part * *reinterpret_cast<const Vector *>(rows[j] + k);
    }
    Vector totals = sums_of<T, lanes>(sums);
    T values[lanes];
    memcpy(values, &totals, sizeof values);
    for (; k < k_size; k++)
        for (int j = 0; j < lanes; j++) values[j] += a[k] * rows[j][k];
    for (int64_t j = 0; accumulate && j < n_size; j++) values[j] += c[j];
    memcpy(c, values, n_size * sizeof(T));
}

// C [M, N] (+)= A [M, K] W [N, K]^T, with W as it is: packed on the way, or for a row or two not at all.
template <typename T>
void multiply_unpacked(int64_t m_size, int64_t n_size, int64_t k_size, const T *a, int64_t a_stride, const T *weight,
                       int64_t w_stride, T *c, int64_t c_stride, bool accumulate) {
    constexpr int64_t lanes = Panel<T>::LANES, columns = Panel<T>::COLUMNS;
    if (m_size <= 2) {
        const T *rows[lanes];
        for (int64_t first = 0; first < n_size; first += lanes) {
            for (int64_t j = 0; j < lanes; j++) rows[j] = weight + std::min(first + j, n_size - 1) * w_stride;
            for (int64_t row = 0; row < m_size; row++)
                multiply_vector(a + row * a_stride, rows, k_size, c + row * c_stride + first,
                                std::min(lanes, n_size - first), accumulate);
        }
        return;
    }
    static thread_local std::vector<T> panel;
    panel.resize(columns * k_size);
    for (int64_t first = 0; first < n_size; first += columns) {
        int64_t used = std::min(columns, n_size - first);
        pack(weight + first * w_stride, w_stride, k_size, used, true, panel.data());
        multiply(m_size, used, k_size, Plain<T>{a, a_stride}, panel.data(), c + first, c_stride, accumulate);
    }
}
