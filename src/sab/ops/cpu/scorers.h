// The scorers of sab/parts/scorers.py: a query of one row, the keys of its microstates, and their gradients.
//
// A scorer provides
//   name           as in the Python registry
//   query_cancels  whether a score is the key, a number, plus the query, which is the same number for all slots
// If the query cancels, keys and query are products of a state with a vector w:
//   project           w · state, or w · a bounded form of the state
//   project_backward  adds the gradient of scale * project(w, state) to dstate
// Else keys and queries are vectors of d entries. The loop multiplies states with matrices, and the scorer provides:
//   finish_query      what else is done to a query after the product; bias has d entries, or is null
//   is_product        whether a score is the inner product of the key with a finished query
//   score             of one key with a finished query, where it is not
//   score_backward    adds the gradients of one score, times dscore, to those of the key, of the query before
//                     finish_query, and of v, which is null where the scorer has none
//   normalises        whether directions alone count: then finish_query is all that it provides, and the loop does the rest
#pragma once

#include "functions.h"
#include "parts.h"

struct Affine {
    static constexpr const char *name = "affine";
    static constexpr bool query_cancels = true, normalises = false;

    template <typename T> static T project(const T *w, const T *state, int64_t n) { return dot(state, w, n); }

    template <typename T>
    static void project_backward(T scale, const T *w, const T *, T *dstate, int64_t n) {
        add_scaled(dstate, scale, w, n);
    }
};

struct AffineTanh {
    static constexpr const char *name = "affine_tanh";
    static constexpr bool query_cancels = true, normalises = false;

    template <typename T> static T project(const T *w, const T *state, int64_t n) {
        T sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t j = 0; j < n; j++) sum += hyperbolic_tangent(state[j]) * w[j];
        return sum;
    }

    template <typename T>
    static void project_backward(T scale, const T *w, const T *state, T *dstate, int64_t n) {
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T bounded = hyperbolic_tangent(state[j]);
            dstate[j] += scale * w[j] * (1 - bounded * bounded);
        }
    }
};

struct MLP {
    static constexpr const char *name = "mlp";
    static constexpr bool query_cancels = false, normalises = false, is_product = false;

    template <typename T> static void finish_query(T *query, const T *bias, int64_t d) {
        add_scaled(query, T(1), bias, d);
    }

    template <typename T> static T score(const T *key, const T *query, const T *v, int64_t d) {
        return tangent_dot(v, key, query, d);
    }

    template <typename T>
    static void score_backward(T dscore, const T *key, const T *query, const T *v, T *dkey, T *dquery, T *dv,
                               int64_t d) {
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            T bounded = hyperbolic_tangent(key[j] + query[j]);
            T inside = dscore * v[j] * (1 - bounded * bounded);
            dkey[j] += inside;
            dquery[j] += inside;
            dv[j] += dscore * bounded;
        }
    }
};

struct Dot {
    static constexpr const char *name = "dot";
    static constexpr bool query_cancels = false, normalises = false, is_product = true;

    template <typename T> static T scale(int64_t d) { return 1 / std::sqrt(T(d)); }

    template <typename T> static void finish_query(T *query, const T *, int64_t d) {
        T factor = scale<T>(d);
        for (int64_t j = 0; j < d; j++) query[j] *= factor;
    }

    template <typename T>
    static void score_backward(T dscore, const T *key, const T *query, const T *, T *dkey, T *dquery, T *, int64_t d) {
        add_scaled(dquery, scale<T>(d) * dscore, key, d);
        add_scaled(dkey, dscore, query, d);
    }
};

struct Cosine {
    static constexpr const char *name = "cosine";
    static constexpr bool query_cancels = false, normalises = true, is_product = true;

    template <typename T> static void finish_query(T *query, const T *bias, int64_t d) {
        add_scaled(query, T(1), bias, d);
    }
};

using Scorers = Parts<Affine, AffineTanh, MLP, Dot, Cosine>;
