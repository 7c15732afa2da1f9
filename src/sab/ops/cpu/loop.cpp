// The recurrence over a whole sequence for a slice of the batch's rows, forward and backward.
//
// Rows of a batch never meet inside the recurrence, so each thread takes some rows through all the steps and no two
// threads wait for each other. Only where the weights are too large for a core's own cache do the threads share each
// matrix product instead, by columns, and wait for each other around it. Weight gradients, where rows do meet, are large
// matrix products made afterwards by the caller from what is stored here. Buffers are [time, row, feature] but for the keys, [row, slot, key]; a microstate is
// not copied: it is the row of `store` that holds its hidden state.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

enum Cell { LSTM, GRU, RNN_TANH, RNN_RELU };
enum Scorer { AFFINE, AFFINE_TANH, MLP, DOT };
enum Weighting { RELU, RELU_NORM, SOFTMAX, SOFTMAX_SINK };
enum Incorporation { ADD, CONCAT, ADD_BOUNDED };

struct Arguments {
    int64_t steps, batch, n, key_size, first_slots, slots, k_top, k_att, k_trunc, seen, bias_size;
    int64_t cell, scorer, weighting, dense, incorporation;
    // How many threads there may be, and whether they share products.
    int64_t threads, shared;
    // Weights; those that enter a matrix product are packed (see `pack`), once for each direction of the pass.
    const void *w_hidden, *w_hidden_back, *b_hidden, *w_query, *w_query_back, *w_memory, *w_memory_back;
    const void *scorer_bias, *v, *w_incorporate, *w_incorporate_back, *b_incorporate;
    // Forward: gates come in as the input's part and go out as activations.
    void *store, *c, *gates, *hidden_new, *h_hat, *query, *keys, *weights, *norms, *summary;
    int32_t *selected;
    const int64_t *lengths;  // of the rows; null where none ends early
    // Scratch of both passes, a row of it for each row of the batch.
    void *hidden_gates, *joined, *dh, *chain, *dh_hat;
    // Backward; dstore and dkeys come in as the gradients from outside.
    void *dstore, *dc, *dcells, *dgates, *dhidden, *dquery, *dkeys, *dsummary, *dweights, *dincorporated, *dv;
};

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

// Matrix products

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
void multiply_block(const T *a, int64_t a_stride, const T *panel, int64_t k_size, T *c, int64_t c_stride, int64_t columns,
                    bool accumulate) {
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

// Functions

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

// v · tanh(a + b). For float four quotients, each below 420 underneath, share one division, which takes longer than all
// the rest of them.
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

template <typename T> void add_scaled(T *out, T scale, const T *a, int64_t size) {
#pragma omp simd
    for (int64_t j = 0; j < size; j++) out[j] += scale * a[j];
}

// The pass

template <typename T> class Pass {
    const Arguments &a;
    const int64_t thread, threads, first, rows, n, gate_size;
    std::vector<T> scores;

    template <typename P> T *at(P *base, int64_t time, int64_t row, int64_t size) const {
        return static_cast<T *>(const_cast<void *>(static_cast<const void *>(base))) + (time * a.batch + row) * size;
    }
    const T *weight(const void *pointer) const { return static_cast<const T *>(pointer); }
    T *key(void *base, int64_t row, int64_t slot) const {
        return static_cast<T *>(base) + (row * a.slots + slot) * a.key_size;
    }
    // Row of `store` with the hidden state after step t (t = -1: the one that came in).
    int64_t stored(int64_t t) const { return a.first_slots + 1 + t; }
    // Row of `store` with the microstate of a slot.
    int64_t microstate(int64_t slot) const {
        if (slot < a.first_slots) return slot;
        int64_t first_kept = a.k_att - 1 - a.seen % a.k_att;
        return stored(first_kept + (slot - a.first_slots) * a.k_att);
    }
    bool keeps(int64_t t) const { return a.k_top > 0 && (a.seen + t + 1) % a.k_att == 0; }
    bool cut_before(int64_t t) const { return a.k_trunc > 0 && a.seen + t > 0 && (a.seen + t) % a.k_trunc == 0; }
    // How many slots are in use when step t reads.
    int64_t slots_at(int64_t t) const {
        return a.k_top == 0 ? 0 : a.first_slots + (a.seen + t) / a.k_att - a.seen / a.k_att;
    }
    // Waits until all threads have come here.
    void meet() const {
#pragma omp barrier
    }
    // C (+)= A B for this thread's rows, or where products are shared for its columns; A and C from the batch's first row.
    void product(int64_t n_size, int64_t k_size, const T *left, int64_t left_stride, const void *packed, T *out,
                 int64_t out_stride, bool accumulate) const {
        if (!a.shared) {
            multiply<T>(rows, n_size, k_size, left + first * left_stride, left_stride, packed, out + first * out_stride,
                        out_stride, accumulate);
            return;
        }
        constexpr int64_t columns = Panel<T>::COLUMNS;
        int64_t panels = (n_size + columns - 1) / columns;
        int64_t from = panels * thread / threads * columns;
        int64_t to = std::min(panels * (thread + 1) / threads * columns, n_size);
        meet();
        if (to > from)
            multiply<T>(a.batch, to - from, k_size, left, left_stride, static_cast<const T *>(packed) + from * k_size,
                        out + from, out_stride, accumulate);
        meet();
    }
    bool affine() const { return a.k_top > 0 && (a.scorer == AFFINE || a.scorer == AFFINE_TANH); }
    // Past its end a row is all zeros, so that nothing grows there that a gradient of 0 would be multiplied with.
    bool ended(int64_t t, int64_t row) const { return a.lengths != nullptr && t >= a.lengths[row]; }

  public:
    Pass(const Arguments &arguments, int64_t thread, int64_t threads)
        : a(arguments), thread(thread), threads(threads), first(a.batch * thread / threads),
          rows(a.batch * (thread + 1) / threads - first), n(arguments.n),
          gate_size(n * (arguments.cell == LSTM ? 4 : arguments.cell == GRU ? 3 : 1)), scores(arguments.slots + 1) {}

    void forward() {
        T *hidden_gates = at(a.hidden_gates, 0, 0, gate_size);
        std::vector<int32_t> best(rows * a.k_top);
        std::vector<T> best_keys(rows * a.k_top);
        std::vector<int64_t> found(rows, 0);
        if (affine())
            for (int64_t row = 0; row < rows; row++)
                for (int64_t slot = 0; slot < a.first_slots; slot++)
                    insert(*key(a.keys, first + row, slot), slot, &best_keys[row * a.k_top], &best[row * a.k_top],
                           found[row]);
        for (int64_t t = 0; t < a.steps; t++) {
            product(gate_size, n, at(a.store, stored(t - 1), 0, n), n, a.w_hidden, hidden_gates, gate_size, false);
            for (int64_t row = first; row < first + rows; row++) cell_forward(t, row, hidden_gates + row * gate_size);
            int64_t used = slots_at(t);
            T *h_hat = at(a.h_hat, t, first, n), *h_new = at(a.store, stored(t), first, n);
            if (used == 0) {
                memcpy(h_new, h_hat, rows * n * sizeof(T));
            } else {
                if (!affine()) query_forward(t);
                for (int64_t row = 0; row < rows; row++)
                    read_forward(t, first + row, used, &best_keys[row * a.k_top], &best[row * a.k_top]);
                incorporate_forward(t);
            }
            for (int64_t row = 0; row < rows; row++)
                if (ended(t, first + row)) memset(h_new + row * n, 0, n * sizeof(T));
            if (keeps(t)) {
                int64_t slot = slots_at(t);
                keep(t, slot);
                if (affine())
                    for (int64_t row = 0; row < rows; row++)
                        insert(*key(a.keys, first + row, slot), slot, &best_keys[row * a.k_top], &best[row * a.k_top],
                               found[row]);
            }
        }
    }

  private:
    // Puts a candidate into the k_top best, highest first; it comes after those it equals, which are older.
    void insert(T score, int64_t slot, T *best_scores, int32_t *best, int64_t &found) const {
        if (found == a.k_top && !(score > best_scores[found - 1])) return;
        int64_t place = found < a.k_top ? found++ : found - 1;
        for (; place > 0 && score > best_scores[place - 1]; place--) {
            best_scores[place] = best_scores[place - 1];
            best[place] = best[place - 1];
        }
        best_scores[place] = score;
        best[place] = static_cast<int32_t>(slot);
    }

    void cell_forward(int64_t t, int64_t row, const T *hidden) const {
        T *gates = at(a.gates, t, row, gate_size), *h_hat = at(a.h_hat, t, row, n);
        const T *h = at(a.store, stored(t - 1), row, n);
        if (ended(t, row)) {
            memset(gates, 0, gate_size * sizeof(T));
            memset(h_hat, 0, n * sizeof(T));
            if (a.cell == LSTM) memset(at(a.c, t + 1, row, n), 0, n * sizeof(T));
            if (a.cell == GRU) memset(at(a.hidden_new, t, row, n), 0, n * sizeof(T));
        } else if (a.cell == LSTM) {
            const T *c = at(a.c, t, row, n);
            T *c_new = at(a.c, t + 1, row, n);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                T i = sigmoid(gates[j] + hidden[j]), f = sigmoid(gates[n + j] + hidden[n + j]);
                T g = hyperbolic_tangent(gates[2 * n + j] + hidden[2 * n + j]);
                T o = sigmoid(gates[3 * n + j] + hidden[3 * n + j]);
                gates[j] = i, gates[n + j] = f, gates[2 * n + j] = g, gates[3 * n + j] = o;
                c_new[j] = f * c[j] + i * g;
                h_hat[j] = o * hyperbolic_tangent(c_new[j]);
            }
        } else if (a.cell == GRU) {
            const T *bias = weight(a.b_hidden);
            T *hidden_new = at(a.hidden_new, t, row, n);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                T r = sigmoid(gates[j] + hidden[j] + bias[j]);
                T z = sigmoid(gates[n + j] + hidden[n + j] + bias[n + j]);
                hidden_new[j] = hidden[2 * n + j] + bias[2 * n + j];
                T fresh = hyperbolic_tangent(gates[2 * n + j] + r * hidden_new[j]);
                gates[j] = r, gates[n + j] = z, gates[2 * n + j] = fresh;
                h_hat[j] = fresh + z * (h[j] - fresh);
            }
        } else {
            bool is_tanh = a.cell == RNN_TANH;
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                T sum = gates[j] + hidden[j];
                gates[j] = h_hat[j] = is_tanh ? hyperbolic_tangent(sum) : std::max(sum, T(0));
            }
        }
    }

    void query_forward(int64_t t) const {
        int64_t d = a.key_size;
        product(d, n, at(a.h_hat, t, 0, n), n, a.w_query, at(a.query, t, 0, d), d, false);
        T *query = at(a.query, t, first, d);
        if (a.scorer == MLP) {
            const T *bias = weight(a.scorer_bias);
            for (int64_t row = 0; row < rows; row++) add_scaled(query + row * d, T(1), bias, d);
        } else {
            T scale = 1 / std::sqrt(T(d));
            for (int64_t j = 0; j < rows * d; j++) query[j] *= scale;
        }
    }

    void read_forward(int64_t t, int64_t row, int64_t used, const T *best_keys, const int32_t *best) {
        if (ended(t, row)) return;  // the buffers say already that nothing was read
        int64_t k = std::min(a.k_top, used);
        int32_t *selected = a.selected + (t * a.batch + row) * a.k_top;
        T *weights = at(a.weights, t, row, a.k_top), *summary = at(a.summary, t, row, n);
        if (affine()) {
            const T *h_hat = at(a.h_hat, t, row, n), *w_query = weight(a.w_query);
            T query = 0;
            if (a.scorer == AFFINE) {
                query = dot(h_hat, w_query, n);
            } else {
#pragma omp simd reduction(+ : query)
                for (int64_t j = 0; j < n; j++) query += hyperbolic_tangent(h_hat[j]) * w_query[j];
            }
            if (a.dense)
                for (int64_t slot = 0; slot < used; slot++) scores[slot] = *key(a.keys, row, slot) + query;
            for (int64_t i = 0; i < k; i++) selected[i] = best[i], weights[i] = best_keys[i] + query;
        } else {
            score_all(t, row, used);
            int64_t found = 0;
            for (int64_t slot = 0; slot < used; slot++) insert(scores[slot], slot, weights, selected, found);
        }
        weigh(weights, k, used, at(a.norms, t, row, 1));
        memset(summary, 0, n * sizeof(T));
        if (a.dense)
            for (int64_t slot = 0; slot < used; slot++)
                add_scaled(summary, scores[slot], at(a.store, microstate(slot), row, n), n);
        else
            for (int64_t i = 0; i < k; i++)
                add_scaled(summary, weights[i], at(a.store, microstate(selected[i]), row, n), n);
    }

    void score_all(int64_t t, int64_t row, int64_t used) {
        int64_t d = a.key_size;
        const T *query = at(a.query, t, row, d), *v = weight(a.v);
        for (int64_t slot = 0; slot < used; slot++) {
            const T *k = key(a.keys, row, slot);
            scores[slot] = a.scorer == DOT ? dot(k, query, d) : tangent_dot(v, k, query, d);
        }
    }

    // The k selected scores, highest first, become weights; in the dense forward all of `scores` do.
    void weigh(T *weights, int64_t k, int64_t used, T *norm) {
        if (a.weighting == RELU || a.weighting == RELU_NORM) {
            T lowest = weights[k - 1], sum = 0;
            for (int64_t i = 0; i < k; i++) sum += weights[i] = std::max(weights[i] - lowest, T(0));
            if (a.weighting == RELU) return;
            *norm = sum + T(1e-7);
            for (int64_t i = 0; i < k; i++) weights[i] /= *norm;
            return;
        }
        T shift = a.weighting == SOFTMAX_SINK ? std::max(weights[0], T(0)) : weights[0];
        T total = a.weighting == SOFTMAX_SINK ? exponential(-shift) : T(0);
        for (int64_t i = 0; i < k; i++) weights[i] = exponential(weights[i] - shift);
        if (a.dense)
            for (int64_t slot = 0; slot < used; slot++) total += scores[slot] = exponential(scores[slot] - shift);
        else
            for (int64_t i = 0; i < k; i++) total += weights[i];
        for (int64_t i = 0; i < k; i++) weights[i] /= total;
        if (a.dense)
            for (int64_t slot = 0; slot < used; slot++) scores[slot] /= total;
    }

    void incorporate_forward(int64_t t) const {
        const T *h_hat = at(a.h_hat, t, first, n), *summary = at(a.summary, t, first, n);
        T *h_new = at(a.store, stored(t), first, n);
        if (a.incorporation == CONCAT) {
            for (int64_t row = 0; row < rows; row++) {
                T *joined = at(a.joined, 0, first + row, 2 * n);
                memcpy(joined, h_hat + row * n, n * sizeof(T));
                memcpy(joined + n, summary + row * n, n * sizeof(T));
            }
            product(n, 2 * n, at(a.joined, 0, 0, 2 * n), 2 * n, a.w_incorporate, at(a.store, stored(t), 0, n), n, false);
            for (int64_t row = 0; row < rows; row++) add_scaled(h_new + row * n, T(1), weight(a.b_incorporate), n);
            return;
        }
        bool bounded = a.incorporation == ADD_BOUNDED;
#pragma omp simd
        for (int64_t j = 0; j < rows * n; j++)
            h_new[j] = h_hat[j] + (bounded ? hyperbolic_tangent(summary[j]) : summary[j]);
    }

    void keep(int64_t t, int64_t slot) const {
        const T *h = at(a.store, stored(t), first, n);
        if (!affine()) {
            product(a.key_size, n, at(a.store, stored(t), 0, n), n, a.w_memory, key(a.keys, 0, slot),
                    a.slots * a.key_size, false);
            return;
        }
        const T *w = weight(a.w_memory);
        int64_t number = (a.seen + t + 1) / a.k_att - 1;
        T bias = number < a.bias_size ? weight(a.scorer_bias)[number] : T(0);
        for (int64_t row = 0; row < rows; row++, h += n) {
            T sum = 0;
            if (a.scorer == AFFINE) {
                sum = dot(h, w, n);
            } else {
#pragma omp simd reduction(+ : sum)
                for (int64_t j = 0; j < n; j++) sum += hyperbolic_tangent(h[j]) * w[j];
            }
            *key(a.keys, first + row, slot) = sum + bias;
        }
    }

  public:
    void backward() {
        T *dh = at(a.dh, 0, first, n), *chain = at(a.chain, 0, first, n), *dh_hat = at(a.dh_hat, 0, first, n);
        std::fill(chain, chain + rows * n, T(0));
        for (int64_t t = a.steps - 1; t >= 0; t--) {
            const T *arriving = at(a.dstore, stored(t), first, n);
            for (int64_t j = 0; j < rows * n; j++) dh[j] = arriving[j] + chain[j];
            for (int64_t row = 0; row < rows; row++)
                if (ended(t, first + row)) memset(dh + row * n, 0, n * sizeof(T));
            if (keeps(t)) keep_backward(t, slots_at(t), dh);
            memcpy(dh_hat, dh, rows * n * sizeof(T));
            if (int64_t used = slots_at(t); used > 0) {
                incorporate_backward(t, dh, dh_hat);
                for (int64_t row = 0; row < rows; row++) read_backward(t, first + row, used, dh_hat + row * n);
                if (!affine())
                    product(n, a.key_size, at(a.dquery, t, 0, a.key_size), a.key_size, a.w_query_back,
                            at(a.dh_hat, 0, 0, n), n, true);
            }
            for (int64_t row = 0; row < rows; row++) cell_backward(t, first + row, dh_hat + row * n, chain + row * n);
            if (cut_before(t)) {
                std::fill(chain, chain + rows * n, T(0));
                if (a.cell == LSTM) memset(at(a.dc, 0, first, n), 0, rows * n * sizeof(T));
            } else {
                product(n, gate_size, at(a.dhidden, t, 0, gate_size), gate_size, a.w_hidden_back, at(a.chain, 0, 0, n), n,
                        a.cell == GRU);
            }
        }
        T *dh_first = at(a.dstore, stored(-1), first, n);
        for (int64_t j = 0; j < rows * n; j++) dh_first[j] += chain[j];
    }

  private:
    void keep_backward(int64_t t, int64_t slot, T *dh) const {
        if (!affine()) {
            product(n, a.key_size, key(a.dkeys, 0, slot), a.slots * a.key_size, a.w_memory_back, at(a.dh, 0, 0, n), n,
                    true);
            return;
        }
        for (int64_t row = 0; row < rows; row++)
            linear_backward(*key(a.dkeys, first + row, slot), weight(a.w_memory), at(a.store, stored(t), first + row, n),
                            dh + row * n);
    }

    // Adds to dh the gradient of scale * w·h, or of scale * w·tanh(h).
    void linear_backward(T scale, const T *w, const T *h, T *dh) const {
        if (a.scorer == AFFINE) return add_scaled(dh, scale, w, n);
#pragma omp simd
        for (int64_t j = 0; j < n; j++) {
            T bounded = hyperbolic_tangent(h[j]);
            dh[j] += scale * w[j] * (1 - bounded * bounded);
        }
    }

    // Turns dsummary, the gradient from outside, into the summary's whole gradient.
    void incorporate_backward(int64_t t, const T *dh, T *dh_hat) const {
        T *ds = at(a.dsummary, t, first, n);
        if (a.incorporation == CONCAT) {
            memcpy(at(a.dincorporated, t, first, n), dh, rows * n * sizeof(T));
            product(2 * n, n, at(a.dh, 0, 0, n), n, a.w_incorporate_back, at(a.joined, 0, 0, 2 * n), 2 * n, false);
            for (int64_t row = 0; row < rows; row++) {
                const T *djoined = at(a.joined, 0, first + row, 2 * n);
                memcpy(dh_hat + row * n, djoined, n * sizeof(T));
                add_scaled(ds + row * n, T(1), djoined + n, n);
            }
            return;
        }
        if (a.incorporation == ADD) return add_scaled(ds, T(1), dh, rows * n);
        const T *summary = at(a.summary, t, first, n);
#pragma omp simd
        for (int64_t j = 0; j < rows * n; j++) {
            T bounded = hyperbolic_tangent(summary[j]);
            ds[j] += dh[j] * (1 - bounded * bounded);
        }
    }

    void read_backward(int64_t t, int64_t row, int64_t used, T *dh_hat) {
        if (ended(t, row)) return;
        int64_t k = std::min(a.k_top, used), d = a.key_size;
        const int32_t *selected = a.selected + (t * a.batch + row) * a.k_top;
        const T *weights = at(a.weights, t, row, a.k_top), *ds = at(a.dsummary, t, row, n);
        T *da = at(a.dweights, t, row, a.k_top);  // comes in as the gradient from outside
        T inner = dot(ds, at(a.summary, t, row, n), n);
        for (int64_t i = 0; i < k; i++) inner += weights[i] * da[i];
        for (int64_t i = 0; i < k; i++) {
            int64_t m = microstate(selected[i]);
            da[i] += dot(ds, at(a.store, m, row, n), n);
            add_scaled(at(a.dstore, m, row, n), weights[i], ds, n);
        }
        weigh_backward(da, weights, k, inner, at(a.norms, t, row, 1));
        if (affine()) {
            T sum = 0;
            for (int64_t i = 0; i < k; i++) {
                *key(a.dkeys, row, selected[i]) += da[i];
                sum += da[i];
            }
            *at(a.dquery, t, row, 1) = sum;
            linear_backward(sum, weight(a.w_query), at(a.h_hat, t, row, n), dh_hat);
            return;
        }
        const T *query = at(a.query, t, row, d);
        T *dquery = at(a.dquery, t, row, d);
        memset(dquery, 0, d * sizeof(T));
        if (a.scorer == DOT) {
            T scale = 1 / std::sqrt(T(d));  // the stored query has it, the weights' gradient needs it
            for (int64_t i = 0; i < k; i++) {
                add_scaled(dquery, scale * da[i], key(a.keys, row, selected[i]), d);
                add_scaled(key(a.dkeys, row, selected[i]), da[i], query, d);
            }
            return;
        }
        const T *v = weight(a.v);
        T *dv = at(a.dv, 0, row, d);
        for (int64_t i = 0; i < k; i++) {
            const T *own = key(a.keys, row, selected[i]);
            T *dkey = key(a.dkeys, row, selected[i]), da_i = da[i];
#pragma omp simd
            for (int64_t j = 0; j < d; j++) {
                T bounded = hyperbolic_tangent(own[j] + query[j]);
                T inside = da_i * v[j] * (1 - bounded * bounded);
                dkey[j] += inside;
                dquery[j] += inside;
                dv[j] += da_i * bounded;
            }
        }
    }

    // Gradients of the weights become gradients of the selected scores; inner is sum(weights * gradients).
    void weigh_backward(T *da, const T *weights, int64_t k, T inner, const T *norm) const {
        if (a.weighting == SOFTMAX || a.weighting == SOFTMAX_SINK) {
            for (int64_t i = 0; i < k; i++) da[i] = weights[i] * (da[i] - inner);
            return;
        }
        T sum = 0;
        for (int64_t i = 0; i < k; i++) {
            if (a.weighting == RELU_NORM) da[i] = (da[i] - inner) / *norm;
            if (!(weights[i] > 0)) da[i] = 0;
            sum += da[i];
        }
        da[k - 1] -= sum;  // the threshold
    }

    void cell_backward(int64_t t, int64_t row, const T *dh_hat, T *chain) const {
        const T *gates = at(a.gates, t, row, gate_size);
        T *dgates = at(a.dgates, t, row, gate_size);
        if (a.cell == LSTM) {
            const T *c = at(a.c, t, row, n), *c_new = at(a.c, t + 1, row, n);
            T *dc = at(a.dc, 0, row, n);
            if (a.dcells != nullptr) add_scaled(dc, T(1), at(a.dcells, t, row, n), n);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                T i = gates[j], f = gates[n + j], g = gates[2 * n + j], o = gates[3 * n + j];
                T bounded = hyperbolic_tangent(c_new[j]);
                T dc_new = dc[j] + dh_hat[j] * o * (1 - bounded * bounded);
                dgates[j] = dc_new * g * i * (1 - i);
                dgates[n + j] = dc_new * c[j] * f * (1 - f);
                dgates[2 * n + j] = dc_new * i * (1 - g * g);
                dgates[3 * n + j] = dh_hat[j] * bounded * o * (1 - o);
                dc[j] = dc_new * f;
            }
        } else if (a.cell == GRU) {
            const T *h = at(a.store, stored(t - 1), row, n), *hidden_new = at(a.hidden_new, t, row, n);
            T *dhidden = at(a.dhidden, t, row, gate_size);
#pragma omp simd
            for (int64_t j = 0; j < n; j++) {
                T r = gates[j], z = gates[n + j], fresh = gates[2 * n + j];
                T dfresh = dh_hat[j] * (1 - z) * (1 - fresh * fresh);
                dgates[j] = dhidden[j] = dfresh * hidden_new[j] * r * (1 - r);
                dgates[n + j] = dhidden[n + j] = dh_hat[j] * (h[j] - fresh) * z * (1 - z);
                dgates[2 * n + j] = dfresh;
                dhidden[2 * n + j] = dfresh * r;
                chain[j] = dh_hat[j] * z;
            }
        } else {
            bool is_tanh = a.cell == RNN_TANH;
#pragma omp simd
            for (int64_t j = 0; j < n; j++)
                dgates[j] = is_tanh ? dh_hat[j] * (1 - gates[j] * gates[j]) : gates[j] > 0 ? dh_hat[j] : T(0);
        }
    }
};

// Runs a pass on a team of threads: torch's own where it uses OpenMP too, so that no two teams compete for the cores.
template <typename T> void run(const Arguments &arguments, bool is_forward) {
#pragma omp parallel num_threads(arguments.threads)
    {
#if defined(_OPENMP)
        Pass<T> pass(arguments, omp_get_thread_num(), omp_get_num_threads());
#else
        Pass<T> pass(arguments, 0, 1);
#endif
        is_forward ? pass.forward() : pass.backward();
    }
}

#define EXPORT(TYPE)                                                                                                   \
    extern "C" int64_t sab_columns_##TYPE() { return Panel<TYPE>::COLUMNS; }                                           \
    extern "C" void sab_pack_##TYPE(const TYPE *b, int64_t k_size, int64_t n_size, bool transposed, TYPE *packed) {    \
        pack(b, k_size, n_size, transposed, packed);                                                                   \
    }                                                                                                                  \
    extern "C" void sab_forward_##TYPE(const Arguments *arguments) { run<TYPE>(*arguments, true); }                    \
    extern "C" void sab_backward_##TYPE(const Arguments *arguments) { run<TYPE>(*arguments, false); }

EXPORT(float)
EXPORT(double)
