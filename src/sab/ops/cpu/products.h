// Matrix products with weights that are packed into panels: beforehand where many products follow, else on the way.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

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
            for (int64_t k = 0; k < k_size; k++)
                memcpy(packed + k * width, b + k * stride + first, used * sizeof(T));
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

// The left factor A of a product as it is, and ROWS rows of one that are packed, [K, ROWS].
template <typename T> struct Plain {
    const T *at;
    int64_t stride;

    T entry(int64_t row, int64_t k) const { return at[row * stride + k]; }
    Plain from(int64_t row) const { return {at + row * stride, stride}; }
};
template <typename T> struct Tile {
    const T *at;

    T entry(int64_t row, int64_t k) const { return at[k * ROWS + row]; }
    Tile from(int64_t row) const { return {at + row}; }
};

// Some rows of C (+)= A B for a panel of B that is `vectors` wide.
template <typename T, int rows, int vectors, typename Left>
void multiply_block(Left a, const T *panel, int64_t k_size, T *c, int64_t c_stride, int64_t columns, bool accumulate) {
    using Vector = typename Panel<T>::Vector;
    constexpr int width = vectors * Panel<T>::LANES;
    Vector sums[rows][vectors] = {};
    for (int64_t k = 0; k < k_size; k++, panel += width) {
        const Vector *b = reinterpret_cast<const Vector *>(panel);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int j = 0; j < vectors; j++) sums[row][j] += a.entry(row, k) * b[j];
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
template <typename T, int rows, int vectors, typename Left>
void multiply_rows(int64_t m, Left a, const T *panel, int64_t k_size, T *c, int64_t c_stride, int64_t columns,
                   bool accumulate) {
    int64_t row = 0;
    for (; row + rows <= m; row += rows)
        multiply_block<T, rows, vectors>(a.from(row), panel, k_size, c + row * c_stride, c_stride, columns, accumulate);
    if constexpr (rows > 1)
        if (row < m)
            multiply_rows<T, rows - 1, vectors>(m - row, a.from(row), panel, k_size, c + row * c_stride, c_stride,
                                                columns, accumulate);
}

// The same for a panel of any width up to `vectors`.
template <typename T, int vectors, typename... Rest>
void multiply_panel(int64_t width, int64_t m, const Rest &...rest) {
    if (width == vectors * Panel<T>::LANES)
        multiply_rows<T, ROWS, vectors>(m, rest...);
    else if constexpr (vectors > 1)
        multiply_panel<T, vectors - 1>(width, m, rest...);
}

// C [M, N] (+)= A [M, K] B [K, N], B packed.
template <typename T, typename Left>
void multiply(int64_t m_size, int64_t n_size, int64_t k_size, Left a, const void *packed, T *c, int64_t c_stride,
              bool accumulate) {
    constexpr int64_t columns = Panel<T>::COLUMNS, lanes = Panel<T>::LANES;
    const T *panel = static_cast<const T *>(packed);
    for (int64_t first = 0; first < n_size; first += columns, panel += columns * k_size) {
        int64_t used = std::min(columns, n_size - first);
        multiply_panel<T, VECTORS>((used + lanes - 1) / lanes * lanes, m_size, a, panel, k_size, c + first, c_stride,
                                   used, accumulate);
    }
}

// Rows `first` to `last` of C [M, N] = A^T B for A [K, M], whose rows are `a_stride` apart, and B [K, N], as gradients of
// weights are: K is large. Pieces of both factors are packed on the way, so that they stay in the core's cache.
template <typename T>
void multiply_transposed(int64_t first, int64_t last, int64_t n_size, int64_t k_size, const T *a, int64_t a_stride,
                         const T *b, T *c) {
    constexpr int64_t depth = 256, width = 5 * Panel<T>::COLUMNS, height = 8 * ROWS;
    static thread_local std::vector<T> left, right;
    left.resize(height * depth), right.resize(depth * width);
    if (k_size == 0) std::fill(c + first * n_size, c + last * n_size, T(0));
    for (int64_t j = 0; j < n_size; j += width)
        for (int64_t k = 0; k < k_size; k += depth) {
            int64_t deep = std::min(depth, k_size - k), wide = std::min(width, n_size - j);
            pack(b + k * n_size + j, n_size, deep, wide, false, right.data());
            for (int64_t row = first; row < last; row += height) {
                int64_t high = std::min<int64_t>(height, last - row);
                for (int64_t i = 0; i < deep; i++) {
                    const T *from = a + (k + i) * a_stride + row;
                    for (int64_t tile = 0; tile < high; tile += ROWS) {
                        T *to = &left[tile * depth + i * ROWS];
                        if (tile + ROWS <= high)
                            memcpy(to, from + tile, ROWS * sizeof(T));  // of a size that is known
                        else
                            memcpy(to, from + tile, (high - tile) * sizeof(T));
                    }
                }
                for (int64_t tile = 0; tile < high; tile += ROWS)
                    multiply(std::min<int64_t>(ROWS, high - tile), wide, deep, Tile<T>{&left[tile * depth]},
                             right.data(), c + (row + tile) * n_size + j, n_size, k > 0);
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
