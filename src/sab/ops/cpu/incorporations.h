// The incorporations of sab/parts/incorporations.py: how the summaries of one step enter the hidden states.
//
// An incorporation works on all rows of a thread at once and provides
//   name         as in the Python registry
//   has_weights  whether it has a weight [n, 2n] and a bias [n]; then it may call `linear` and `linear_backward`
//                (saves_map in Python: whether `mapped` is there to keep what `linear` made)
//   forward      (s, linear) fills h_new; linear(out) makes out = weight [h_hat, summary] + bias
//   backward     (s, linear_backward) fills the outputs of IncorporationBackward; linear_backward() adds to dh_hat and
//                dsummary what flows there from dlinear, which must be filled before
// Each thread must call `linear` and `linear_backward` equally often: threads may wait for each other there.
#pragma once

#include "functions.h"
#include "parts.h"

template <typename T> struct IncorporationForward {
    int64_t size;  // entries of each vector: rows times n
    const T *h_hat, *summary;
    T *h_new;   // out
    T *mapped;  // out, where saves_map: what `linear` made
};

template <typename T> struct IncorporationBackward {
    int64_t size;
    const T *h_hat, *summary, *mapped, *dh;
    T *dh_hat;    // out
    T *dsummary;  // the gradient from elsewhere, to add to
    T *dlinear;   // out, where has_weights: the gradient of what `linear` made; the weights' gradients come from it
};

struct Add {
    static constexpr const char *name = "add";
    static constexpr bool has_weights = false;

    template <typename T, typename Linear> static void forward(const IncorporationForward<T> s, const Linear &) {
#pragma omp simd
        for (int64_t j = 0; j < s.size; j++) s.h_new[j] = s.h_hat[j] + s.summary[j];
    }

    template <typename T, typename Linear> static void backward(const IncorporationBackward<T> s, const Linear &) {
        memcpy(s.dh_hat, s.dh, s.size * sizeof(T));
        add_scaled(s.dsummary, T(1), s.dh, s.size);
    }
};

struct Concat {
    static constexpr const char *name = "concat";
    static constexpr bool has_weights = true;

    template <typename T, typename Linear>
    static void forward(const IncorporationForward<T> s, const Linear &linear) {
        linear(s.h_new);
    }

    template <typename T, typename Linear>
    static void backward(const IncorporationBackward<T> s, const Linear &linear_backward) {
        memcpy(s.dlinear, s.dh, s.size * sizeof(T));
        memset(s.dh_hat, 0, s.size * sizeof(T));
        linear_backward();
    }
};

struct AddBounded {
    static constexpr const char *name = "add_bounded";
    static constexpr bool has_weights = false;

    template <typename T, typename Linear> static void forward(const IncorporationForward<T> s, const Linear &) {
#pragma omp simd
        for (int64_t j = 0; j < s.size; j++) s.h_new[j] = s.h_hat[j] + hyperbolic_tangent(s.summary[j]);
    }

    template <typename T, typename Linear> static void backward(const IncorporationBackward<T> s, const Linear &) {
        memcpy(s.dh_hat, s.dh, s.size * sizeof(T));
#pragma omp simd
        for (int64_t j = 0; j < s.size; j++) {
            T bounded = hyperbolic_tangent(s.summary[j]);
            s.dsummary[j] += s.dh[j] * (1 - bounded * bounded);
        }
    }
};

struct Gate {
    static constexpr const char *name = "gate";
    static constexpr bool has_weights = true;

    template <typename T, typename Linear>
    static void forward(const IncorporationForward<T> s, const Linear &linear) {
        linear(s.mapped);
#pragma omp simd
        for (int64_t j = 0; j < s.size; j++)
            s.h_new[j] = s.h_hat[j] + sigmoid(s.mapped[j]) * (s.summary[j] - s.h_hat[j]);
    }

    template <typename T, typename Linear>
    static void backward(const IncorporationBackward<T> s, const Linear &linear_backward) {
#pragma omp simd
        for (int64_t j = 0; j < s.size; j++) {
            T share = sigmoid(s.mapped[j]);
            s.dlinear[j] = s.dh[j] * (s.summary[j] - s.h_hat[j]) * share * (1 - share);
            s.dh_hat[j] = s.dh[j] * (1 - share);
            s.dsummary[j] += s.dh[j] * share;
        }
        linear_backward();
    }
};

using Incorporations = Parts<Add, Concat, AddBounded, Gate>;
