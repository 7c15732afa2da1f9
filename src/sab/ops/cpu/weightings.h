// The weightings of sab/parts/weightings.py: from the k selected scores of one row to weights, in place.
//
// A weighting provides
//   name            as in the Python registry
//   normalises_all  whether it can weigh all slots (the dense forward)
//   saves_norm      whether its backward needs the sum that weights were divided by
//   forward         fills Weighed's outputs
//   backward        turns gradients of the k weights into gradients of the selected scores, in place
#pragma once

#include "functions.h"
#include "parts.h"

template <typename T> struct Weighed {
    T *weights;    // in: the selected scores, highest first; out: their weights
    int64_t k;     // how many are selected, at least one
    T *all;        // null but in the dense forward; in: the scores of all slots; out: their weights
    int64_t used;  // how many slots there are
    T *norm;       // out, where saves_norm
};

// Subtracts the lowest score, so that the last of the selected has weight 0; returns the sum.
template <typename T> T subtract_lowest(const Weighed<T> &s) {
    T lowest = s.weights[s.k - 1], sum = 0;
    for (int64_t i = 0; i < s.k; i++) sum += s.weights[i] = std::max(s.weights[i] - lowest, T(0));
    return sum;
}

template <typename T> void subtract_lowest_backward(T *da, const T *weights, int64_t k) {
    T sum = 0;
    for (int64_t i = 0; i < k; i++) {
        if (!(weights[i] > 0)) da[i] = 0;
        sum += da[i];
    }
    da[k - 1] -= sum;  // the lowest score
}

// Scores become exp(score - shift) / total, where total is their sum, over all slots in the dense forward, plus `rest`.
template <typename T> void divide_exponentials(const Weighed<T> &s, T shift, T rest) {
    T total = rest;
    for (int64_t i = 0; i < s.k; i++) s.weights[i] = exponential(s.weights[i] - shift);
    if (s.all != nullptr)
        for (int64_t slot = 0; slot < s.used; slot++) total += s.all[slot] = exponential(s.all[slot] - shift);
    else
        for (int64_t i = 0; i < s.k; i++) total += s.weights[i];
    for (int64_t i = 0; i < s.k; i++) s.weights[i] /= total;
    if (s.all != nullptr)
        for (int64_t slot = 0; slot < s.used; slot++) s.all[slot] /= total;
}

// In every backward, inner is the sum of weights times gradients, over all slots in the dense forward.
template <typename T> void divide_exponentials_backward(T *da, const T *weights, int64_t k, T inner) {
    for (int64_t i = 0; i < k; i++) da[i] = weights[i] * (da[i] - inner);
}

struct Relu {
    static constexpr const char *name = "relu";
    static constexpr bool normalises_all = false, saves_norm = false;

    template <typename T> static void forward(const Weighed<T> &s) { subtract_lowest(s); }

    template <typename T> static void backward(T *da, const T *weights, int64_t k, T, const T *) {
        subtract_lowest_backward(da, weights, k);
    }
};

struct ReluNorm {
    static constexpr const char *name = "relu_norm";
    static constexpr bool normalises_all = false, saves_norm = true;

    template <typename T> static void forward(const Weighed<T> &s) {
        *s.norm = subtract_lowest(s) + T(1e-7);
        for (int64_t i = 0; i < s.k; i++) s.weights[i] /= *s.norm;
    }

    template <typename T> static void backward(T *da, const T *weights, int64_t k, T inner, const T *norm) {
        for (int64_t i = 0; i < k; i++) da[i] = (da[i] - inner) / *norm;
        subtract_lowest_backward(da, weights, k);
    }
};

struct Softmax {
    static constexpr const char *name = "softmax";
    static constexpr bool normalises_all = true, saves_norm = false;

    template <typename T> static void forward(const Weighed<T> &s) { divide_exponentials(s, s.weights[0], T(0)); }

    template <typename T> static void backward(T *da, const T *weights, int64_t k, T inner, const T *) {
        divide_exponentials_backward(da, weights, k, inner);
    }
};

struct SoftmaxSink {
    static constexpr const char *name = "softmax_sink";
    static constexpr bool normalises_all = true, saves_norm = false;

    template <typename T> static void forward(const Weighed<T> &s) {
        T shift = std::max(s.weights[0], T(0));  // the sink's score is 0
        divide_exponentials(s, shift, exponential(-shift));
    }

    template <typename T> static void backward(T *da, const T *weights, int64_t k, T inner, const T *) {
        divide_exponentials_backward(da, weights, k, inner);
    }
};

using Weightings = Parts<Relu, ReluNorm, Softmax, SoftmaxSink>;
