// Matrix products whose right factor, a weight, is packed into panels beforehand.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

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

// B [K, N] (or its transpose) in panels of COLUMNS columns, [panel, K, COLUMNS], the last one filled up with zeros.
template <typename T> void pack(const T *b, int64_t k_size, int64_t n_size, bool transposed, T *packed) {
    constexpr int columns = Panel<T>::COLUMNS;
    for (int64_t first = 0; first < n_size; first += columns)
        for (int64_t k = 0; k < k_size; k++)
            for (int64_t j = 0; j < columns; j++) {
                int64_t column = first + j;
                *packed++ = column >= n_size ? T(0) : transposed ? b[column * k_size + k] : b[k * n_size + column];
            }
}

template <typename T, int rows>
void multiply_block(const T *a, int64_t a_stride, const T *panel, int64_t k_size, T *c, int64_t c_stride,
                    int64_t columns, bool accumulate) {
    using Vector = typename Panel<T>::Vector;
    Vector sums[rows][VECTORS] = {};
    for (int64_t k = 0; k < k_size; k++, panel += Panel<T>::COLUMNS) {
        const Vector *b = reinterpret_cast<const Vector *>(panel);
#pragma GCC unroll 8
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++) sums[row][j] += a[row * a_stride + k] * b[j];
    }
    T values[rows][Panel<T>::COLUMNS];
    memcpy(values, sums, sizeof values);
    for (int row = 0; row < rows; row++)
        for (int64_t j = 0; j < columns; j++)
            c[row * c_stride + j] = accumulate ? c[row * c_stride + j] + values[row][j] : values[row][j];
}

template <typename T, int rows>
void multiply_rows(int64_t m, const T *a, int64_t a_stride, const T *panel, int64_t k_size, T *c, int64_t c_stride,
                   int64_t columns, bool accumulate) {
    if (m == rows)
        multiply_block<T, rows>(a, a_stride, panel, k_size, c, c_stride, columns, accumulate);
    else if constexpr (rows > 1)
        multiply_rows<T, rows - 1>(m, a, a_stride, panel, k_size, c, c_stride, columns, accumulate);
}

// C [M, N] (+)= A [M, K] B [K, N], B packed.
template <typename T>
void multiply(int64_t m_size, int64_t n_size, int64_t k_size, const T *a, int64_t a_stride, const void *packed, T *c,
              int64_t c_stride, bool accumulate) {
    constexpr int columns = Panel<T>::COLUMNS;
    const T *panel = static_cast<const T *>(packed);
    for (int64_t first = 0; first < n_size; first += columns, panel += columns * k_size)
        for (int64_t row = 0; row < m_size; row += ROWS)
            multiply_rows<T, ROWS>(std::min<int64_t>(ROWS, m_size - row), a + row * a_stride, a_stride, panel, k_size,
                                   c + row * c_stride + first, c_stride, std::min<int64_t>(columns, n_size - first),
                                   accumulate);
}
