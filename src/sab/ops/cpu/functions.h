// Functions of numbers and of vectors that several parts use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

// exp for float without branches, so that loops over it vectorise: x = i ln 2 + r, and a polynomial in r.
inline float exponential(float x) {
    x = std::min(std::max(x, -87.0f), 88.0f);
    float i = std::nearbyint(x * 1.44269504f);
    float r = (x - i * 0.693359375f) + i * 2.12194440e-4f;
    float sum = 1.0f / 5040;
    sum = sum * r + 1.0f / 720;
    sum = sum * r + 1.0f / 120;
    sum = sum * r + 1.0f / 24;
    sum = sum * r + 1.0f / 6;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    int32_t bits = (static_cast<int32_t>(i) + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return power * sum;
}
// tanh for float as x P(x^2) / Q(x^2), fitted for the least relative error on (0, 9], where tanh rounds to 1: within
// 4e-7, and half the work of going through exp.
struct Quotient {
    float above, below;
};
inline Quotient tangent_quotient(float x) {
    x = std::min(std::max(x, -9.0f), 9.0f);
    float y = x * x;
    float p = 1.3354175563680724e-08f;
    p = p * y + 2.060880262868038e-05f;
    p = p * y + 0.003495574835553999f;
    p = p * y + 0.13381015819261308f;
    p = p * y + 0.9999999795295691f;
    float q = 7.776379252277114e-07f;
    q = q * y + 0.00032856103632927086f;
    q = q * y + 0.025876935844160124f;
    q = q * y + 0.46714331461773684f;
    q = q * y + 1.0f;
    return {x * p, q};
}
inline float hyperbolic_tangent(float x) {
    Quotient t = tangent_quotient(x);
    return std::min(std::max(t.above / t.below, -1.0f), 1.0f);
}
inline float sigmoid(float x) { return 1 / (1 + exponential(-x)); }

inline double exponential(double x) { return std::exp(x); }
inline double hyperbolic_tangent(double x) { return std::tanh(x); }
inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

template <typename T> T dot(const T *a, const T *b, int64_t size) {
    T sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; j++) sum += a[j] * b[j];
    return sum;
}

// 1 / the length of a vector; SMALLEST_SQUARE of sab/parts/scorers.py keeps it finite.
template <typename T> T inverse_length(const T *a, int64_t size) {
    return 1 / std::sqrt(dot(a, a, size) + T(1e-5) * T(size));
}

// v · tanh(a + b). A division takes longer than all the rest of a quotient, so for float four quotients share one: each
// denominator is below 420, and their product does not overflow.
inline double tangent_dot(const double *v, const double *a, const double *b, int64_t size) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; j++) sum += v[j] * hyperbolic_tangent(a[j] + b[j]);
    return sum;
}
inline float tangent_dot(const float *v, const float *a, const float *b, int64_t size) {
    float sum = 0;
    int64_t quarter = size / 4;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < quarter; j++) {
        int64_t j1 = j + quarter, j2 = j1 + quarter, j3 = j2 + quarter;
        Quotient t0 = tangent_quotient(a[j] + b[j]), t1 = tangent_quotient(a[j1] + b[j1]);
        Quotient t2 = tangent_quotient(a[j2] + b[j2]), t3 = tangent_quotient(a[j3] + b[j3]);
        float first = t0.below * t1.below, second = t2.below * t3.below;
        sum += ((v[j] * t0.above * t1.below + v[j1] * t1.above * t0.below) * second +
                (v[j2] * t2.above * t3.below + v[j3] * t3.above * t2.below) * first) /
               (first * second);
    }
    for (int64_t j = 4 * quarter; j < size; j++) sum += v[j] * hyperbolic_tangent(a[j] + b[j]);
    return sum;
}

// Layer norm of a vector without gain and bias: fills `normed`, returns what the differences from the mean were
// multiplied with. NORM_EPSILON of sab/parts/cells.py keeps it finite.
template <typename T> T normalise(const T *x, T *normed, int64_t size) {
    T sum = 0, squares = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < size; j++) sum += x[j];
    T mean = sum / T(size);
#pragma omp simd reduction(+ : squares)
    for (int64_t j = 0; j < size; j++) {
        normed[j] = x[j] - mean;
        squares += normed[j] * normed[j];
    }
    T scale = 1 / std::sqrt(squares / T(size) + T(1e-5));
#pragma omp simd
    for (int64_t j = 0; j < size; j++) normed[j] *= scale;
    return scale;
}

// Turns the gradient d of gain * normed into that of x, in place, and adds the gain's to dgain.
template <typename T>
void normalise_backward(T *d, const T *normed, const T *gain, T scale, T *dgain, int64_t size) {
    T sum = 0, along = 0;
#pragma omp simd reduction(+ : sum, along)
    for (int64_t j = 0; j < size; j++) {
        dgain[j] += d[j] * normed[j];
        d[j] *= gain[j];
        sum += d[j];
        along += d[j] * normed[j];
    }
    T mean = sum / T(size), share = along / T(size);
#pragma omp simd
    for (int64_t j = 0; j < size; j++) d[j] = scale * (d[j] - mean - share * normed[j]);
}

template <typename T> void add_scaled(T *out, T scale, const T *a, int64_t size) {
#pragma omp simd
    for (int64_t j = 0; j < size; j++) out[j] += scale * a[j];
}
