// The cells of sab/parts/cells.py: one step of one row of the batch, forward and backward.
//
// A cell provides
//   name          as in the Python registry
//   gates         rows of the weights, in multiples of n
//   has_c         whether it carries a cell state c besides the hidden state h
//   splits_gates  whether the input's part and the hidden state's part of the gates do not enter as their sum alone
//   reads_h       whether h enters the step other than through the gates
//   forward       fills CellForward's outputs
//   backward      fills CellBackward's outputs
#pragma once

#include "functions.h"
#include "parts.h"

// Vectors have n entries, those of gates n for each gate.
template <typename T> struct CellForward {
    int64_t n;
    T *gates;           // in: the input's part with all biases that can be added to it; out: activated
    const T *h_gates;   // W_hh h
    const T *h_bias;    // b_hh; read only where splits_gates, since it is already in `gates` elsewhere
    const T *h;         // the hidden state before the step
    const T *c;         // where has_c: the cell state before the step
    T *c_new;           // out, where has_c
    T *hidden_new;      // out, where splits_gates: h_gates + h_bias of the last gate
    T *h_hat;           // out: the provisional hidden state
    // Where has_c, gain and bias of c's layer norm before it is read; null without layer norm.
    const T *c_gain, *c_bias;
};

template <typename T> struct CellBackward {
    int64_t n;
    const T *gates, *h, *c, *c_new, *hidden_new;  // as the forward left them
    const T *dh_hat;
    T *dc;        // where has_c; in: the gradient of c_new from later steps; out: the gradient of c
    T *dgates;    // out: the gradient of the input's part
    T *dh_gates;  // out, where splits_gates: the gradient of h_gates, which is dgates elsewhere
    T *dh;        // out, where reads_h: the gradient of h other than through the gates
    const T *c_gain, *c_bias;  // as in the forward
    T *dc_gain, *dc_bias;      // with layer norm of c: their gradients are added
    T *normed_c, *dread;       // scratch of n entries each
};

struct LSTM {
    static constexpr const char *name = "lstm";
    static constexpr int64_t gates = 4;
    static constexpr bool has_c = true, splits_gates = false, reads_h = false;

    template <typename T> static void forward(const CellForward<T> s) {
        const int64_t n = s.n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T i = sigmoid(s.gates[j] + s.h_gates[j]), f = sigmoid(s.gates[n + j] + s.h_gates[n + j]);
            T g = hyperbolic_tangent(s.gates[2 * n + j] + s.h_gates[2 * n + j]);
            T o = sigmoid(s.gates[3 * n + j] + s.h_gates[3 * n + j]);
            s.gates[j] = i, s.gates[n + j] = f, s.gates[2 * n + j] = g, s.gates[3 * n + j] = o;
            s.c_new[j] = f * s.c[j] + i * g;
            s.h_hat[j] = o * hyperbolic_tangent(s.c_new[j]);
        }
        if (s.c_gain == nullptr) return;
        normalise(s.c_new, s.h_hat, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++)
            s.h_hat[j] = s.gates[3 * n + j] * hyperbolic_tangent(s.c_gain[j] * s.h_hat[j] + s.c_bias[j]);
    }

    template <typename T> static void backward(const CellBackward<T> s) {
        const int64_t n = s.n;
        if (s.c_gain != nullptr) return normed_backward(s);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T o = s.gates[3 * n + j], bounded = hyperbolic_tangent(s.c_new[j]);
            T dc_new = s.dc[j] + s.dh_hat[j] * o * (1 - bounded * bounded);
            s.dgates[3 * n + j] = s.dh_hat[j] * bounded * o * (1 - o);
            into_c(s, j, dc_new);
        }
    }

  private:
    // The same where what is read of c is normalised.
    template <typename T> static void normed_backward(const CellBackward<T> s) {
        const int64_t n = s.n;
        T scale = normalise(s.c_new, s.normed_c, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T o = s.gates[3 * n + j], bounded = hyperbolic_tangent(s.c_gain[j] * s.normed_c[j] + s.c_bias[j]);
            s.dread[j] = s.dh_hat[j] * o * (1 - bounded * bounded);
            s.dgates[3 * n + j] = s.dh_hat[j] * bounded * o * (1 - o);
            s.dc_bias[j] += s.dread[j];
        }
        normalise_backward(s.dread, s.normed_c, s.c_gain, scale, s.dc_gain, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) into_c(s, j, s.dc[j] + s.dread[j]);
    }

    // From the whole gradient of c_new to those of what it was made from.
    template <typename T> static inline void into_c(const CellBackward<T> &s, int64_t j, T dc_new) {
        const int64_t n = s.n;
        T i = s.gates[j], f = s.gates[n + j], g = s.gates[2 * n + j];
        s.dgates[j] = dc_new * g * i * (1 - i);
        s.dgates[n + j] = dc_new * s.c[j] * f * (1 - f);
        s.dgates[2 * n + j] = dc_new * i * (1 - g * g);
        s.dc[j] = dc_new * f;
    }
};

struct GRU {
    static constexpr const char *name = "gru";
    static constexpr int64_t gates = 3;
    static constexpr bool has_c = false, splits_gates = true, reads_h = true;

    template <typename T> static void forward(const CellForward<T> s) {
        const int64_t n = s.n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T r = sigmoid(s.gates[j] + s.h_gates[j] + s.h_bias[j]);
            T z = sigmoid(s.gates[n + j] + s.h_gates[n + j] + s.h_bias[n + j]);
            s.hidden_new[j] = s.h_gates[2 * n + j] + s.h_bias[2 * n + j];
            T fresh = hyperbolic_tangent(s.gates[2 * n + j] + r * s.hidden_new[j]);
            s.gates[j] = r, s.gates[n + j] = z, s.gates[2 * n + j] = fresh;
            s.h_hat[j] = fresh + z * (s.h[j] - fresh);
        }
    }

    template <typename T> static void backward(const CellBackward<T> s) {
        const int64_t n = s.n;
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T r = s.gates[j], z = s.gates[n + j], fresh = s.gates[2 * n + j];
            T dfresh = s.dh_hat[j] * (1 - z) * (1 - fresh * fresh);
            s.dgates[j] = s.dh_gates[j] = dfresh * s.hidden_new[j] * r * (1 - r);
            s.dgates[n + j] = s.dh_gates[n + j] = s.dh_hat[j] * (s.h[j] - fresh) * z * (1 - z);
            s.dgates[2 * n + j] = dfresh;
            s.dh_gates[2 * n + j] = dfresh * r;
            s.dh[j] = s.dh_hat[j] * z;
        }
    }
};

struct RNNTanh {
    static constexpr const char *name = "rnn_tanh";
    static constexpr int64_t gates = 1;
    static constexpr bool has_c = false, splits_gates = false, reads_h = false;

    template <typename T> static void forward(const CellForward<T> s) {
#pragma omp simd
        for (int64_t j = 0; j < s.n; j++) s.gates[j] = s.h_hat[j] = hyperbolic_tangent(s.gates[j] + s.h_gates[j]);
    }

    template <typename T> static void backward(const CellBackward<T> s) {
#pragma omp simd
        for (int64_t j = 0; j < s.n; j++) s.dgates[j] = s.dh_hat[j] * (1 - s.gates[j] * s.gates[j]);
    }
};

struct RNNRelu {
    static constexpr const char *name = "rnn_relu";
    static constexpr int64_t gates = 1;
    static constexpr bool has_c = false, splits_gates = false, reads_h = false;

    template <typename T> static void forward(const CellForward<T> s) {
#pragma omp simd
        for (int64_t j = 0; j < s.n; j++) s.gates[j] = s.h_hat[j] = std::max(s.gates[j] + s.h_gates[j], T(0));
    }

    template <typename T> static void backward(const CellBackward<T> s) {
#pragma omp simd
        for (int64_t j = 0; j < s.n; j++) s.dgates[j] = s.gates[j] > 0 ? s.dh_hat[j] : T(0);
    }
};

using Cells = Parts<LSTM, GRU, RNNTanh, RNNRelu>;
