// The recurrence over a whole sequence, forward and backward.
//
// Rows of a batch never meet inside the recurrence, so each thread takes a few rows through all the steps, then the next
// few, and no two threads wait for each other: what these rows read stays in the core's cache. A thread begins with the
// same rows in every pass, which may still be in the cache of its core; idle threads take over groups that a delayed
// thread has not begun. Only where the weights are much larger than that cache, or rows few, do the threads share each
// matrix product instead, by columns, and wait for each other around it. Rows do meet in the weights' gradients: these
// are large matrix products that the caller makes afterwards from what is stored here. Buffers are [time, row, feature]
// but for the keys, [row, slot, key]. A microstate is not copied: it is the row of `store` with its hidden state.
//
// The mathematics of the parts is in cells.h, scorers.h, weightings.h and incorporations.h.

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#if defined(_OPENMP)
#include <omp.h>
#endif

#include "cells.h"
#include "forgetting.h"
#include "functions.h"
#include "incorporations.h"
#include "products.h"
#include "schedule.h"
#include "scorers.h"
#include "selection.h"
#include "weightings.h"

// arguments.py has the same members in the same order. A pointer is null where a configuration has no such buffer.
struct Arguments {
    int64_t steps, batch, n, key_size, first_slots, slots, k_top, k_att, k_trunc, seen, bias_size;
    // Indices in the lists of parts; without a memory (k_top = 0) only the cell's is read.
    int64_t cell, scorer, weighting, dense, incorporation;
    // How many threads there may be, and whether they share products.
    int64_t threads, shared;
    // Entries of an input, where the gates are made here; for a step of a stream, whether weights are as they are and
    // not packed; whether buffers that only the backward reads have all steps; whether products round their factors to
    // bfloat16, where weights are packed in pairs.
    int64_t input_size, unpacked, saves, rounds;
    // Of the sketch of a stream's keys: room for so many slots, and the slot that they begin at.
    int64_t sketch_slots, sketch_begin;
    // Of a bounded macrostate: its bound, or 0, the rule of forgetting, how many microstates a row of `live` has room
    // for, and how many there are before the first step.
    int64_t max_memory, forget, places, remembered;
    // Of two levels of memory: the size of the smallest blocks, or 0, and how many of them a step reads.
    int64_t block_size, blocks;
    // Weights; those that enter a matrix product are packed (see `pack`), once for each direction of the pass.
    const void *w_hidden, *w_hidden_back, *b_hidden, *w_query, *w_query_back, *w_memory, *w_memory_back;
    const void *scorer_bias, *v;
    // Of the incorporation: the halves of its weight for ĥ and for the summary.
    const void *w_incorporate, *w_incorporate_back, *w_summary, *w_summary_back, *b_incorporate;
    // Gains of the layer norm of the two products, the bias of the input's, gain and bias of that of c; the mask of
    // recurrent dropout, [row, n]. Null without these options.
    const void *norm_ih, *norm_hh, *b_input, *norm_c_weight, *norm_c_bias, *h_mask;
    // The inputs [time, row, input_size], with weights and bias, from which the input's part of the gates is made; null
    // where it is in `gates`.
    const void *x, *w_x, *b_x;
    // Forward: gates come in as the input's part, if not made here, and go out as activations.
    void *store, *c, *gates, *hidden_new, *h_hat, *query, *keys, *weights, *norms, *summary, *mapped;
    void *key_scale, *query_scale, *scores;
    void *x_normed, *x_scale, *h_normed, *h_scale;
    int32_t *selected;
    const int32_t *turn_rates;  // of the entries of keys and queries; see sab/parts/scorers.py
    const int64_t *lengths;  // of the rows; null where none ends early
    // Scratch of both passes, a row of it for each row of the batch; dsummary_now is of one step's summaries.
    void *hidden_gates, *dh, *chain, *dh_hat, *masked, *dsummary_now;
    // Backward; dstore, dkeys, dsummary and dweights come in as the gradients from outside, dsummary null for zeros.
    void *dstore, *dc, *dcells, *dgates, *dhidden, *dquery, *dkeys, *dsummary, *dweights, *dincorporated, *dv;
    void *dnorm_ih, *dnorm_hh, *db_ih, *db_hh, *dnorm_c_weight, *dnorm_c_bias;
    // A step of a stream, null elsewhere: the memory, [row, slot, n] with room for `slots` of them, as `keys` and the
    // numbers are.
    void *microstates;
    int64_t *numbers;
    void *sketch_codes, *sketch_scales, *sketch_facts;  // of its keys; null without
    // Of a bounded macrostate, [row, places]: the slots of what it holds, oldest first, and counts of reads, or null.
    int32_t *live;
    int64_t *reads;
    // Of a stream with an index: writes the slots that may have the highest scores for a query into `live`, oldest first,
    // `places` of them at most, and returns how many there are, one at least. Null: all slots may.
    int64_t (*find)(const void *query);
    void *block_keys;  // of a stream with two levels of memory, see blocks.h; null without
};

// Whether scores are inner products of keys with a query.
static bool is_product(const Arguments &a) {
    return visit(Scorers{}, a.scorer, [](auto scorer) {
        if constexpr (scorer.query_cancels)
            return false;
        else
            return scorer.is_product;
    });
}

// Whether the library has the parts that the arguments name.
static bool check(const Arguments &a) {
    if (!Cells::has(a.cell)) return false;
    if (a.k_top == 0) return true;
    if (!Scorers::has(a.scorer) || !Weightings::has(a.weighting) || !Incorporations::has(a.incorporation)) return false;
    if (a.block_size > 0 && (a.dense || a.max_memory > 0 || !is_product(a))) return false;
    return !a.dense || visit(Weightings{}, a.weighting, [](auto weighting) { return weighting.normalises_all; });
}

// The cosines and sines of the angles by which pairs of entries of keys and queries are turned at each step of a pass.
template <typename T> class Turns {
    int64_t pairs = 0;  // the first ones of a key; no other is turned
    std::vector<T> cosines, sines;

  public:
    explicit Turns(const Arguments &a) {
        if (a.turn_rates == nullptr) return;
        while (pairs < a.key_size / 2 && a.turn_rates[2 * pairs] != 0) pairs++;
        cosines.resize(a.steps * pairs), sines.resize(a.steps * pairs);
        for (int64_t t = 0; t < a.steps; t++)
            for (int64_t pair = 0; pair < pairs; pair++) {
                uint32_t turns = uint32_t(a.seen + t) * uint32_t(a.turn_rates[2 * pair]);  // exact at any step
                double angle = turns * (2 * 3.14159265358979323846 / 4294967296.0);
                cosines[t * pairs + pair] = T(std::cos(angle)), sines[t * pairs + pair] = T(std::sin(angle));
            }
    }

    // Turns a key or a query by the angles of step t, or back with a direction of -1.
    void turn(int64_t t, T *x, T direction) const {
        const T *cosine = &cosines[t * pairs], *sine = &sines[t * pairs];
#pragma omp simd
        for (int64_t pair = 0; pair < pairs; pair++) {
            T even = x[2 * pair], odd = x[2 * pair + 1], across = direction * sine[pair];
            x[2 * pair] = even * cosine[pair] - odd * across;
            x[2 * pair + 1] = even * across + odd * cosine[pair];
        }
    }
};

// How many slots there must be for a sketch of the keys to be worth its making; more than any number where there is none.
template <typename T> int64_t fewest_sketched(const Arguments &a) {
    bool is_sketched = a.k_top > 0 && is_product(a) && !a.dense && a.max_memory == 0 && a.block_size == 0 &&
                       a.key_size <= Sketch<T>::LARGEST;
    return is_sketched ? Sketch<T>::FEWEST : std::numeric_limits<int64_t>::max();
}

// Rows that a thread takes through all steps at a time, at most. One number of each fills a line of the cache, which two
// threads then seldom write to at once.
constexpr int64_t GROUP = 16;

// The threads of a pass. OpenMP's barrier spins for milliseconds: if another program holds a core, the spinning thread
// keeps the late one from running.
class Team {
    alignas(64) std::atomic<int64_t> arrived{0};
    alignas(64) std::atomic<int64_t> generation{0};
    static constexpr int64_t SPINS = 10000;  // some microseconds

  public:
    static int64_t number() {
#if defined(_OPENMP)
        return omp_get_thread_num();
#else
        return 0;
#endif
    }
    static int64_t count() {
#if defined(_OPENMP)
        return omp_get_num_threads();
#else
        return 1;
#endif
    }
    // Waits until all threads have come here: spins for a while, then yields the core.
    void meet() {
        int64_t now = generation;
        if (++arrived == count()) {
            arrived = 0;
            generation = now + 1;
            return;
        }
        for (int64_t spins = 0; generation == now; spins++)
            if (spins > SPINS) std::this_thread::yield();
    }
};

// All steps of `rows` rows from row `first` on. Where threads share products, each has a part of the batch.
template <typename T> class Pass {
    const Arguments &a;
    const Turns<T> &turns;
    Team &team;
    const Schedule schedule;
    const int64_t part, parts, first, rows, n, d, gate_size;
    const int64_t longest;  // steps until all rows have ended; where products are shared, all of the batch
    const bool query_cancels, splits_gates;
    std::vector<T> scratch, total;  // for one key or query
    std::vector<T> gate_bias;       // all biases that can be added to the input's part of the gates
    std::vector<T> normed_c, dread;  // of one row's layer norm of c
    Selector<T> selector;

  public:
    Pass(const Arguments &a, const Turns<T> &turns, Team &team, int64_t part, int64_t parts)
        : a(a), turns(turns), team(team), schedule(a.k_top, a.k_att, a.k_trunc, a.seen, a.first_slots, a.microstates == nullptr ? a.first_slots : 0),
          part(part), parts(parts),
          first(a.batch * part / parts), rows(a.batch * (part + 1) / parts - first), n(a.n), d(a.key_size),
          gate_size(n * visit(Cells{}, a.cell, [](auto cell) { return cell.gates; })),
          longest(a.lengths == nullptr ? a.steps
                  : a.shared           ? *std::max_element(a.lengths, a.lengths + a.batch)
                                       : *std::max_element(a.lengths + first, a.lengths + first + rows)),
          query_cancels(a.k_top > 0 &&
                        visit(Scorers{}, a.scorer, [](auto scorer) { return scorer.query_cancels; })),
          splits_gates(visit(Cells{}, a.cell, [](auto cell) { return cell.splits_gates; })),
          scratch(d), total(d),
          normed_c(a.norm_c_weight == nullptr ? 0 : n), dread(normed_c.size()),
          selector(a.block_size > 0 ? 0 : a.find == nullptr ? schedule.slots_at(a.steps) + 1 : a.places) {}

    void forward() {
        T *hidden_gates = at(a.hidden_gates, 0, 0, gate_size);
        gate_bias.resize(a.x == nullptr ? 0 : gate_size);
        if (a.x != nullptr && a.norm_ih == nullptr) {  // with layer norm they come after it
            if (a.b_x != nullptr) add_scaled(gate_bias.data(), T(1), weight(a.b_x), gate_size);
            if (!splits_gates) add_scaled(gate_bias.data(), T(1), weight(a.b_hidden), gate_size);
        }
        if (a.max_memory > 0 && a.microstates == nullptr)  // a stream comes with its own
            for (int64_t row = first; row < first + rows; row++)
                for (int64_t i = 0; i < a.places; i++)
                    a.live[row * a.places + i] = i < a.first_slots ? static_cast<int32_t>(i) : -1;
        // If the query cancels, keys alone decide what a step selects, so each row's selection is kept up to date.
        std::vector<T> best_keys(query_cancels ? rows * a.k_top : 0);
        std::vector<int32_t> best_slots(best_keys.size());
        std::vector<Best<T>> best;
        if (query_cancels)
            for (int64_t row = 0; row < rows; row++) {
                best.push_back({a.k_top, &best_keys[row * a.k_top], &best_slots[row * a.k_top]});
                const Remembered held = remembered(first + row, used_at(0));
                for (int64_t i = 0; i < used_at(0); i++) {
                    int64_t slot = a.max_memory > 0 ? held.slots[i] : i;
                    best[row].insert(*key(a.keys, first + row, slot), slot);
                }
            }
        Sketches<T> &sketches = selector.sketches;
        if (a.sketch_codes != nullptr) {
            sketches.view(a.sketch_codes, a.sketch_scales, a.sketch_facts, first, a.sketch_slots, d, a.sketch_begin);
        } else if (a.steps >= 8 && schedule.slots_at(a.steps) >= fewest_sketched<T>(a)) {
            // Not in a call of few steps, which would sketch an old memory for little.
            sketches.resize(rows, schedule.slots_at(a.steps), d);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t slot = 0; slot < a.first_slots; slot++) sketches.add(row, slot, key(a.keys, first + row, slot));
        }
        Blocks<T> &blocks = selector.blocks;
        if (a.block_keys != nullptr) {
            blocks.view(a.block_keys, first, a.slots, d, a.block_size, a.blocks);
        } else if (a.block_size > 0) {
            blocks.resize(rows, schedule.slots_at(a.steps), d, a.block_size, a.blocks);
            for (int64_t row = 0; row < rows; row++)
                for (int64_t slot = 0; slot < a.first_slots; slot++) blocks.add(row, slot, key(a.keys, first + row, 0));
        }
        for (int64_t row = first; a.key_scale != nullptr && row < first + rows; row++)
            std::fill(&key_scale(row, 0), &key_scale(row, 0) + a.first_slots, T(0));
        for (int64_t t = 0; t < longest; t++) {
            if (a.x != nullptr) input_forward(t);
            product(gate_size, n, entering(t), n, a.w_hidden, hidden_gates, gate_size, false);
            for (int64_t row = first; row < first + rows; row++) cell_forward(t, row, hidden_gates + row * gate_size);
            int64_t slot = schedule.slots_at(t), used = used_at(t);
            T *h_new = hidden(a.store, t, first);
            if (used == 0) {
                memcpy(h_new, of_step(a.h_hat, t, first, n), rows * n * sizeof(T));
                if (a.k_top > 0)
                    for (int64_t row = first; row < first + rows; row++) read_nothing(t, row);
            } else {
                if (!query_cancels) query_forward(t);
                for (int64_t row = 0; row < rows; row++)
                    read_forward(t, first + row, used, query_cancels ? &best[row] : nullptr);
                incorporate_forward(t);
            }
            for (int64_t row = 0; row < rows; row++)
                if (ended(t, first + row)) memset(h_new + row * n, 0, n * sizeof(T));
            if (schedule.keeps(t)) {
                keep_forward(t, slot);
                if (a.microstates != nullptr)
                    for (int64_t row = 0; row < rows; row++) {
                        memcpy(const_cast<T *>(microstate(first + row, slot)), h_new + row * n, n * sizeof(T));
                        a.numbers[(first + row) * a.slots + slot] = schedule.number(t);
                    }
                if (a.max_memory > 0)
                    for (int64_t row = 0; row < rows; row++)
                        remember(t, first + row, slot, used, query_cancels ? &best[row] : nullptr);
                else if (query_cancels)
                    for (int64_t row = 0; row < rows; row++) best[row].insert(*key(a.keys, first + row, slot), slot);
                if (!sketches.empty())
                    for (int64_t row = 0; row < rows; row++) sketches.add(row, slot, key(a.keys, first + row, slot));
                if (!blocks.empty())
                    for (int64_t row = 0; row < rows; row++) blocks.add(row, slot, key(a.keys, first + row, 0));
            }
        }
        for (int64_t t = longest; t < a.steps; t++) padding_forward(t);
    }

    void backward() {
        T *dh = at(a.dh, 0, first, n), *chain = at(a.chain, 0, first, n), *dh_hat = at(a.dh_hat, 0, first, n);
        bool reads_h = visit(Cells{}, a.cell, [](auto cell) { return cell.reads_h; });
        std::fill(chain, chain + rows * n, T(0));
        for (int64_t t = longest; t < a.steps; t++) padding_backward(t);
        for (int64_t t = longest - 1; t >= 0; t--) {
            const T *arriving = hidden(a.dstore, t, first);
            for (int64_t j = 0; j < rows * n; j++) dh[j] = arriving[j] + chain[j];
            for (int64_t row = 0; row < rows; row++)
                if (ended(t, first + row)) memset(dh + row * n, 0, n * sizeof(T));
            int64_t used = used_at(t);
            if (schedule.keeps(t)) keep_backward(t, schedule.slots_at(t), dh);
            if (used == 0) {
                memcpy(dh_hat, dh, rows * n * sizeof(T));
                if (a.dquery != nullptr) std::fill_n(at(a.dquery, t, first, d), rows * d, T(0));
                if (a.dincorporated != nullptr) std::fill_n(at(a.dincorporated, t, first, n), rows * n, T(0));
            } else {
                incorporate_backward(t, dh, dh_hat);
                for (int64_t row = 0; row < rows; row++) read_backward(t, first + row, used, dh_hat + row * n);
                if (!query_cancels)
                    product(n, d, at(a.dquery, t, 0, d), d, a.w_query_back, at(a.dh_hat, 0, 0, n), n, true);
            }
            for (int64_t row = 0; row < rows; row++) cell_backward(t, first + row, dh_hat + row * n, chain + row * n);
            if (schedule.cuts_before(t)) {
                std::fill(chain, chain + rows * n, T(0));
                if (a.dc != nullptr) memset(at(a.dc, 0, first, n), 0, rows * n * sizeof(T));
            } else if (a.h_mask == nullptr) {
                product(n, gate_size, dh_gates_of(t, 0), gate_size, a.w_hidden_back, at(a.chain, 0, 0, n), n, reads_h);
            } else {
                if (!reads_h) std::fill(chain, chain + rows * n, T(0));
                product(n, gate_size, dh_gates_of(t, 0), gate_size, a.w_hidden_back, at(a.masked, 0, 0, n), n, false);
                const T *mask = weight(a.h_mask) + first * n, *dmasked = at(a.masked, 0, first, n);
                for (int64_t j = 0; j < rows * n; j++) chain[j] += mask[j] * dmasked[j];
            }
        }
        T *dh_first = hidden(a.dstore, -1, first);
        for (int64_t j = 0; j < rows * n; j++) dh_first[j] += chain[j];
    }

  private:
    static void clear(T *buffer, int64_t size) {
        if (buffer != nullptr) std::fill_n(buffer, size, T(0));
    }
    // A row of a buffer [time, batch, size]; null where there is no such buffer.
    T *at(void *base, int64_t time, int64_t row, int64_t size) const {
        return base == nullptr ? nullptr : static_cast<T *>(base) + (time * a.batch + row) * size;
    }
    // The same where only a backward needs more than one step: without one, all steps have the same memory.
    T *of_step(void *base, int64_t t, int64_t row, int64_t size) const { return at(base, a.saves ? t : 0, row, size); }
    // A row of the hidden states, or of their gradients, after step t.
    T *hidden(void *base, int64_t t, int64_t row) const { return at(base, schedule.stored(t), row, n); }
    T *key(void *base, int64_t row, int64_t slot) const { return static_cast<T *>(base) + (row * a.slots + slot) * d; }
    const T *microstate(int64_t row, int64_t slot) const {
        if (a.microstates == nullptr) return at(a.store, schedule.microstate(slot), row, n);
        return static_cast<T *>(a.microstates) + (row * a.slots + slot) * n;
    }
    // How many microstates there are when step t reads.
    int64_t used_at(int64_t t) const {
        int64_t slots = schedule.slots_at(t);
        return a.max_memory == 0 ? slots : std::min(a.max_memory, slots - a.first_slots + a.remembered);
    }
    // What a row of a bounded macrostate holds when there are `used` microstates.
    Remembered remembered(int64_t row, int64_t used) const {
        return {a.live + row * a.places, a.reads == nullptr ? nullptr : a.reads + row * a.places, used, a.max_memory};
    }
    // Adds what step t keeps to a bounded macrostate; `best` as for `read_forward`.
    void remember(int64_t t, int64_t row, int64_t slot, int64_t used, Best<T> *best) const {
        if (ended(t, row)) return;
        Remembered held = remembered(row, used);
        int64_t lost = held.keep(slot, schedule.number(t), a.forget);
        if (best == nullptr || lost == slot) return;
        if (std::find(best->slots, best->slots + best->found, lost) == best->slots + best->found)
            return best->insert(*key(a.keys, row, slot), slot);
        best->found = 0;
        for (int64_t i = 0; i < used; i++) best->insert(*key(a.keys, row, held.slots[i]), held.slots[i]);
    }
    // Of a scorer that normalises: 1 / the length of W_m m, and what the terms of a score are multiplied with.
    T &key_scale(int64_t row, int64_t slot) const { return static_cast<T *>(a.key_scale)[row * a.slots + slot]; }
    T score_scale(int64_t t, int64_t row) const { return std::sqrt(T(d)) * *of_step(a.query_scale, t, row, 1); }

    // What the inner products of keys with are scores, in `scratch`.
    void scaled_query(int64_t t, int64_t row) {
        const T *query = of_step(a.query, t, row, d), *v = weight(a.v), scale = score_scale(t, row);
        T *out = scratch.data();
#pragma omp simd
        for (int64_t j = 0; j < d; j++) out[j] = scale * v[j] * query[j];
        turns.turn(t, scratch.data(), T(1));
    }
    const T *weight(const void *pointer) const { return static_cast<const T *>(pointer); }
    // Past its end a row is all zeros, so that nothing grows there that a gradient of 0 would be multiplied with.
    bool ended(int64_t t, int64_t row) const { return a.lengths != nullptr && t >= a.lengths[row]; }

    // C (+)= A B for this thread's rows, or its columns where products are shared; A and C from the batch's first row.
    // The rows of a weight that is not packed are k_size apart, or as far as the last argument.
    void product(int64_t n_size, int64_t k_size, const T *left, int64_t left_stride, const void *packed, T *out,
                 int64_t out_stride, bool accumulate, int64_t weight_stride = 0) const {
        int64_t factor_stride = a.unpacked && weight_stride > 0 ? weight_stride : a.rounds ? pairs_of(k_size) : k_size;
        auto some = [&](int64_t m_size, int64_t n_size, const T *left, const T *factor, T *out) {
            if constexpr (CAN_ROUND<T>)
                if (a.rounds)
                    return multiply_rounded(m_size, n_size, k_size, left, left_stride, factor, out, out_stride, accumulate);
            if (a.unpacked)
                multiply_unpacked<T>(m_size, n_size, k_size, left, left_stride, factor, factor_stride, out, out_stride,
                                     accumulate);
            else
                multiply(m_size, n_size, k_size, Plain<T>{left, left_stride}, weight(factor), out, out_stride, accumulate);
        };
        if (!a.shared) return some(rows, n_size, left + first * left_stride, weight(packed), out + first * out_stride);
        constexpr int64_t columns = Panel<T>::COLUMNS;
        int64_t panels = (n_size + columns - 1) / columns;
        int64_t from = panels * part / parts * columns;
        int64_t to = std::min(panels * (part + 1) / parts * columns, n_size);
        team.meet();
        if (to > from) some(a.batch, to - from, left, weight(packed) + from * factor_stride, out + from);
        team.meet();
    }

    // The inputs' part of the gates, with all biases that can be added to it.
    void input_forward(int64_t t) const {
        T *gates = of_step(a.gates, t, 0, gate_size);
        for (int64_t row = first; row < first + rows; row++)
            memcpy(gates + row * gate_size, gate_bias.data(), gate_size * sizeof(T));
        product(gate_size, a.input_size, weight(a.x) + t * a.batch * a.input_size, a.input_size, a.w_x, gates, gate_size, true);
    }

    // What enters the recurrent product of step t, from the batch's first row on: the hidden states before it, masked
    // where there is a mask.
    const T *entering(int64_t t) const {
        if (a.h_mask == nullptr) return hidden(a.store, t - 1, 0);
        const T *mask = weight(a.h_mask) + first * n, *h = hidden(a.store, t - 1, first);
        T *masked = at(a.masked, 0, first, n);
        for (int64_t j = 0; j < rows * n; j++) masked[j] = mask[j] * h[j];
        return at(a.masked, 0, 0, n);
    }

    // Layer norm of a row's two products, in place.
    void normalise_gates(int64_t t, int64_t row, T *x_gates, T *h_gates) const {
        T *x_normed = at(a.x_normed, t, row, gate_size), *h_normed = at(a.h_normed, t, row, gate_size);
        T &x_scale = *at(a.x_scale, t, row, 1), &h_scale = *at(a.h_scale, t, row, 1);
        if (ended(t, row)) {
            x_scale = h_scale = 0;
            for (T *normed : {x_normed, h_normed}) memset(normed, 0, gate_size * sizeof(T));
            return;
        }
        x_scale = normalise(x_gates, x_normed, gate_size);
        h_scale = normalise(h_gates, h_normed, gate_size);
        const T *x_gain = weight(a.norm_ih), *h_gain = weight(a.norm_hh), *bias = weight(a.b_input);
#pragma omp simd
        for (int64_t j = 0; j < gate_size; j++) {
            x_gates[j] = x_gain[j] * x_normed[j] + bias[j];
            h_gates[j] = h_gain[j] * h_normed[j];
        }
    }

    // A step after the end of all rows: nothing is computed, and the buffers are filled as for rows that have ended.
    void padding_forward(int64_t t) const {
        for (int64_t row = first; row < first + rows; row++) {
            cell_forward(t, row, nullptr);
            if (a.k_top > 0) read_nothing(t, row);
        }
        clear(hidden(a.store, t, first), rows * n);
        clear(of_step(a.mapped, t, first, n), rows * n);
        if (!schedule.keeps(t)) return;
        int64_t slot = schedule.slots_at(t);
        for (int64_t row = first; row < first + rows; row++) {
            clear(key(a.keys, row, slot), d);
            if (a.key_scale != nullptr) key_scale(row, slot) = 0;
        }
    }

    // No gradient comes from such a step.
    void padding_backward(int64_t t) const {
        clear(at(a.dgates, t, first, gate_size), rows * gate_size);
        int64_t hidden_size = splits_gates && a.norm_ih == nullptr ? n : gate_size;
        if (a.dhidden != a.dgates) clear(at(a.dhidden, t, first, hidden_size), rows * hidden_size);
        clear(at(a.dquery, t, first, d), rows * d);
        clear(at(a.dincorporated, t, first, n), rows * n);
    }

    // The gradients of the products, in the place of those of their layer norms.
    void normalise_gates_backward(int64_t t, int64_t row, T *dgates, T *dh_gates) const {
        if (!splits_gates) memcpy(dh_gates, dgates, gate_size * sizeof(T));
        normalise_backward(dgates, at(a.x_normed, t, row, gate_size), weight(a.norm_ih), *at(a.x_scale, t, row, 1),
                           at(a.dnorm_ih, 0, row, gate_size), gate_size);
        normalise_backward(dh_gates, at(a.h_normed, t, row, gate_size), weight(a.norm_hh), *at(a.h_scale, t, row, 1),
                           at(a.dnorm_hh, 0, row, gate_size), gate_size);
    }

    void cell_forward(int64_t t, int64_t row, T *h_gates) const {
        CellForward<T> s{n,
                         of_step(a.gates, t, row, gate_size),
                         h_gates,
                         weight(a.b_hidden),
                         hidden(a.store, t - 1, row),
                         at(a.c, t, row, n),
                         at(a.c, t + 1, row, n),
                         of_step(a.hidden_new, t, row, n),
                         of_step(a.h_hat, t, row, n),
                         weight(a.norm_c_weight),
                         weight(a.norm_c_bias)};
        if (a.norm_ih != nullptr) normalise_gates(t, row, s.gates, h_gates);
        if (!ended(t, row)) return visit(Cells{}, a.cell, [&](auto cell) { cell.forward(s); });
        clear(s.gates, gate_size);
        for (T *states : {s.h_hat, s.c_new, s.hidden_new}) clear(states, n);
    }

    void cell_backward(int64_t t, int64_t row, const T *dh_hat, T *chain) {
        CellBackward<T> s{n,
                          of_step(a.gates, t, row, gate_size),
                          hidden(a.store, t - 1, row),
                          at(a.c, t, row, n),
                          at(a.c, t + 1, row, n),
                          of_step(a.hidden_new, t, row, n),
                          dh_hat,
                          at(a.dc, 0, row, n),
                          at(a.dgates, t, row, gate_size),
                          dh_gates_of(t, row),
                          chain,
                          weight(a.norm_c_weight),
                          weight(a.norm_c_bias),
                          at(a.dnorm_c_weight, 0, row, n),
                          at(a.dnorm_c_bias, 0, row, n),
                          normed_c.data(),
                          dread.data()};
        if (a.dcells != nullptr) add_scaled(s.dc, T(1), at(a.dcells, t, row, n), n);
        visit(Cells{}, a.cell, [&](auto cell) { cell.backward(s); });
        if (a.db_ih != nullptr) add_scaled(at(a.db_ih, 0, row, gate_size), T(1), s.dgates, gate_size);
        if (a.db_hh != nullptr) add_scaled(at(a.db_hh, 0, row, gate_size), T(1), s.dh_gates, gate_size);
        if (a.norm_ih != nullptr)
            normalise_gates_backward(t, row, s.dgates, s.dh_gates);
        else if (splits_gates)
            memcpy(at(a.dhidden, t, row, n), s.dh_gates + gate_size - n, n * sizeof(T));
    }

    // A row of the gradient of h_gates; scratch where `dhidden` is that of the last gate alone.
    T *dh_gates_of(int64_t t, int64_t row) const {
        if (splits_gates && a.norm_ih == nullptr) return at(a.hidden_gates, 0, row, gate_size);
        return at(a.dhidden, t, row, gate_size);
    }

    // The queries of a step, where they are vectors.
    void query_forward(int64_t t) const {
        product(d, n, of_step(a.h_hat, t, 0, n), n, a.w_query, of_step(a.query, t, 0, d), d, false);
        visit(Scorers{}, a.scorer, [&](auto scorer) {
            if constexpr (!scorer.query_cancels)
                for (int64_t row = first; row < first + rows; row++) {
                    T *query = of_step(a.query, t, row, d);
                    scorer.finish_query(query, weight(a.scorer_bias), d);
                    if constexpr (scorer.normalises) *of_step(a.query_scale, t, row, 1) = inverse_length(query, d);
                }
        });
    }

    // Fills the buffers of a row that reads nothing. What no step needs is not left to chance: the same inputs give the
    // same outputs to the last bit.
    void read_nothing(int64_t t, int64_t row) const {
        std::fill_n(a.selected + (t * a.batch + row) * a.k_top, a.k_top, -1);
        clear(at(a.weights, t, row, a.k_top), a.k_top);
        clear(at(a.summary, t, row, n), n);
        clear(of_step(a.scores, t, row, a.k_top), a.k_top);
        clear(of_step(a.norms, t, row, 1), 1);
        clear(of_step(a.query_scale, t, row, 1), 1);
        clear(of_step(a.query, t, row, d), d);
    }

    // Selects, weighs and sums up what one row reads; `best` is its selection if the query cancels.
    void read_forward(int64_t t, int64_t row, int64_t used, const Best<T> *best) {
        if (ended(t, row)) return read_nothing(t, row);
        int64_t k = std::min(a.k_top, used);
        int32_t *selected = a.selected + (t * a.batch + row) * a.k_top;
        T *weights = at(a.weights, t, row, a.k_top), *summary = at(a.summary, t, row, n), *scores = selector.scores.data();
        Remembered held = remembered(row, used);
        bool has_list = a.max_memory > 0 || a.find != nullptr;
        auto slot_of = [&](int64_t i) { return has_list ? int64_t(held.slots[i]) : i; };
        visit(Scorers{}, a.scorer, [&](auto scorer) {
            if constexpr (scorer.query_cancels) {
                T query = scorer.project(weight(a.w_query), of_step(a.h_hat, t, row, n), n);
                if (a.dense)
                    for (int64_t i = 0; i < used; i++) scores[i] = *key(a.keys, row, slot_of(i)) + query;
                for (int64_t i = 0; i < k; i++) selected[i] = best->slots[i], weights[i] = best->scores[i] + query;
            } else {
                const T *query = of_step(a.query, t, row, d), *v = weight(a.v);
                if constexpr (scorer.normalises) scaled_query(t, row), query = scratch.data();
                Best<T> found{a.k_top, weights, selected};
                if constexpr (scorer.is_product) {
                    if (a.find != nullptr) held.used = used = a.find(query), k = std::min(a.k_top, used);
                    if (has_list)
                        held.multiply(key(a.keys, row, 0), query, d, scores), selector.select(used, found, a.dense);
                    else if (a.block_size > 0)
                        selector.select_by_blocks(row - first, key(a.keys, row, 0), query, used, d, found);
                    else
                        selector.select_by_product(row - first, key(a.keys, row, 0), query, used, d, found, a.dense);
                } else {
                    for (int64_t i = 0; i < used; i++) scores[i] = scorer.score(key(a.keys, row, slot_of(i)), query, v, d);
                    selector.select(used, found, a.dense);
                }
                for (int64_t i = 0; i < k; i++) selected[i] = static_cast<int32_t>(slot_of(selected[i]));
                if constexpr (scorer.normalises) {
                    T *of_selected = of_step(a.scores, t, row, a.k_top);
                    memcpy(of_selected, weights, k * sizeof(T));
                    std::fill(of_selected + k, of_selected + a.k_top, T(0));
                }
            }
        });
        if (a.max_memory > 0)
            for (int64_t i = 0; i < k; i++) held.count(selected[i]);
        for (int64_t i = k; i < a.k_top; i++) weights[i] = 0, selected[i] = -1;
        Weighed<T> s{weights, k, a.dense ? scores : nullptr, used, of_step(a.norms, t, row, 1)};
        visit(Weightings{}, a.weighting, [&](auto weighting) { weighting.forward(s); });
        if (a.dense)
            sum_scaled(summary, scores, [&](int64_t i) { return microstate(row, slot_of(i)); }, used, n);
        else
            sum_scaled(summary, weights, [&](int64_t i) { return microstate(row, selected[i]); }, k, n);
    }

    void read_backward(int64_t t, int64_t row, int64_t used, T *dh_hat) {
        if (ended(t, row)) {
            std::fill_n(at(a.dquery, t, row, d), d, T(0));
            return;
        }
        int64_t k = std::min(a.k_top, used);
        const int32_t *selected = a.selected + (t * a.batch + row) * a.k_top;
        const T *weights = at(a.weights, t, row, a.k_top), *ds = at(a.dsummary_now, 0, row, n);
        T *da = at(a.dweights, t, row, a.k_top);  // comes in as the gradient from outside
        T inner = dot(ds, at(a.summary, t, row, n), n);
        for (int64_t i = 0; i < k; i++) inner += weights[i] * da[i];
        for (int64_t i = 0; i < k; i++) {
            int64_t m = schedule.microstate(selected[i]);
            const T *microstate = at(a.store, m, row, n);
            T *dmicrostate = at(a.dstore, m, row, n), along = 0, share = weights[i];
#pragma omp simd reduction(+ : along)
            for (int64_t j = 0; j < n; j++) {
                along += ds[j] * microstate[j];
                dmicrostate[j] += share * ds[j];
            }
            da[i] += along;
        }
        visit(Weightings{}, a.weighting,
              [&](auto weighting) { weighting.backward(da, weights, k, inner, of_step(a.norms, t, row, 1)); });
        visit(Scorers{}, a.scorer, [&](auto scorer) {
            T *dquery = at(a.dquery, t, row, d);
            if constexpr (scorer.query_cancels) {
                T sum = 0;
                for (int64_t i = 0; i < k; i++) {
                    *key(a.dkeys, row, selected[i]) += da[i];
                    sum += da[i];
                }
                *dquery = sum;
                scorer.project_backward(sum, weight(a.w_query), of_step(a.h_hat, t, row, n), dh_hat, n);
            } else {
                memset(dquery, 0, d * sizeof(T));
                if constexpr (scorer.normalises)
                    normalised_backward(t, row, k, selected, da, dquery);
                else
                    for (int64_t i = 0; i < k; i++)
                        scorer.score_backward(da[i], key(a.keys, row, selected[i]), of_step(a.query, t, row, d), weight(a.v),
                                              key(a.dkeys, row, selected[i]), dquery, at(a.dv, 0, row, d), d);
            }
        });
    }

    // The same where keys and query have length 1 and are turned: the gradients of the products that they were made
    // from, those of the keys still turned (`keep_backward` turns them back). A key from before the pass came as it is.
    void normalised_backward(int64_t t, int64_t row, int64_t k, const int32_t *selected, const T *da, T *dquery) {
        const T *query = of_step(a.query, t, row, d), *scores = of_step(a.scores, t, row, a.k_top), *v = weight(a.v);
        T *dv = at(a.dv, 0, row, d), scale = score_scale(t, row), inverse = *of_step(a.query_scale, t, row, 1), sum = 0;
        scaled_query(t, row);
        std::fill(total.begin(), total.end(), T(0));
        for (int64_t i = 0; i < k; i++) {
            const T *own = key(a.keys, row, selected[i]);
            bool is_new = selected[i] >= a.first_slots;
            T along = da[i] * scores[i], factor = is_new ? key_scale(row, selected[i]) : T(1);
            T of_query = factor * da[i], of_own = is_new ? factor * along : T(0), of_total = scale * da[i];
            T *dkey = key(a.dkeys, row, selected[i]), *whole = total.data();
            const T *turned = scratch.data();
#pragma omp simd
            for (int64_t j = 0; j < d; j++) {
                dkey[j] += of_query * turned[j] - of_own * own[j];
                whole[j] += of_total * own[j];
            }
            sum += along;
        }
        turns.turn(t, total.data(), T(-1));
        const T *whole = total.data();
        T of_query = sum * inverse * inverse;
#pragma omp simd
        for (int64_t j = 0; j < d; j++) {
            dquery[j] = v[j] * whole[j] - of_query * query[j];
            dv[j] += query[j] * whole[j];
        }
    }

    void incorporate_forward(int64_t t) const {
        const T *h_hat = of_step(a.h_hat, t, first, n), *summary = at(a.summary, t, first, n);
        auto linear = [&](T *out) {
            for (int64_t row = 0; row < rows; row++) memcpy(out + row * n, a.b_incorporate, n * sizeof(T));
            product(n, n, of_step(a.h_hat, t, 0, n), n, a.w_incorporate, out - first * n, n, true, 2 * n);
            product(n, n, at(a.summary, t, 0, n), n, a.w_summary, out - first * n, n, true, 2 * n);
        };
        IncorporationForward<T> s{rows * n, h_hat, summary, hidden(a.store, t, first), of_step(a.mapped, t, first, n)};
        visit(Incorporations{}, a.incorporation, [&](auto incorporation) { incorporation.forward(s, linear); });
    }

    void incorporate_backward(int64_t t, const T *dh, T *dh_hat) const {
        T *dsummary = at(a.dsummary_now, 0, first, n);
        if (a.dsummary == nullptr)
            memset(dsummary, 0, rows * n * sizeof(T));
        else
            memcpy(dsummary, at(a.dsummary, t, first, n), rows * n * sizeof(T));
        auto linear_backward = [&]() {
            const T *dlinear = at(a.dincorporated, t, 0, n);
            product(n, n, dlinear, n, a.w_incorporate_back, at(a.dh_hat, 0, 0, n), n, true);
            product(n, n, dlinear, n, a.w_summary_back, at(a.dsummary_now, 0, 0, n), n, true);
        };
        IncorporationBackward<T> s{rows * n, of_step(a.h_hat, t, first, n), at(a.summary, t, first, n),
                                   of_step(a.mapped, t, first, n), dh, dh_hat, dsummary, at(a.dincorporated, t, first, n)};
        visit(Incorporations{}, a.incorporation,
              [&](auto incorporation) { incorporation.backward(s, linear_backward); });
    }

    // Makes the keys of the microstates that step t keeps.
    void keep_forward(int64_t t, int64_t slot) const {
        if (!query_cancels) {
            product(d, n, hidden(a.store, t, 0), n, a.w_memory, key(a.keys, 0, slot), a.slots * d, false);
            return visit(Scorers{}, a.scorer, [&](auto scorer) {
                if constexpr (scorer.normalises)
                    for (int64_t row = first; row < first + rows; row++) {
                        T scale = inverse_length(key(a.keys, row, slot), d);
                        if (a.key_scale != nullptr) key_scale(row, slot) = scale;
                        T *made = key(a.keys, row, slot);
#pragma omp simd
                        for (int64_t j = 0; j < d; j++) made[j] *= scale;
                        turns.turn(t, made, T(1));
                    }
            });
        }
        int64_t number = schedule.number(t);
        T bias = number < a.bias_size ? weight(a.scorer_bias)[number] : T(0);
        visit(Scorers{}, a.scorer, [&](auto scorer) {
            if constexpr (scorer.query_cancels)
                for (int64_t row = first; row < first + rows; row++)
                    *key(a.keys, row, slot) = scorer.project(weight(a.w_memory), hidden(a.store, t, row), n) + bias;
        });
    }

    void keep_backward(int64_t t, int64_t slot, T *dh) {
        if (!query_cancels) {
            if (a.turn_rates != nullptr)
                for (int64_t row = first; row < first + rows; row++) turns.turn(t, key(a.dkeys, row, slot), T(-1));
            return product(n, d, key(a.dkeys, 0, slot), a.slots * d, a.w_memory_back, at(a.dh, 0, 0, n), n, true);
        }
        visit(Scorers{}, a.scorer, [&](auto scorer) {
            if constexpr (scorer.query_cancels)
                for (int64_t row = 0; row < rows; row++)
                    scorer.project_backward(*key(a.dkeys, first + row, slot), weight(a.w_memory),
                                            hidden(a.store, t, first + row), dh + row * n, n);
        });
    }
};

constexpr int64_t ONE_EACH = 0;  // in the place of a number of parts: one for each thread

// Runs work(part, parts) for each part on a team of threads: torch's own where it uses OpenMP too, so that no two teams
// compete for the cores. A thread begins with its own parts and goes on with those that others have not begun. Its own
// are dealt out to and fro, as 0 3 4 7 and 1 2 5 6, so that parts which become shorter give each thread as much work.
template <typename Work> void share(Team &team, int64_t threads, int64_t parts, const Work &work) {
    std::vector<std::atomic<bool>> taken(std::max(threads, parts));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        int64_t number = Team::number(), count = Team::count(), all = parts == ONE_EACH ? count : parts;
        auto take = [&](int64_t part) {
            if (part < all && !taken[part].exchange(true)) work(part, all);
        };
        for (int64_t first = 0; first < all; first += count)
            take(first + (first / count % 2 == 0 ? number : count - 1 - number));
        for (int64_t part = 0; part < all; part++) take(part);
        team.meet();
    }
}

// Runs a pass. Returns 0, or 1 where the library does not have one of the parts or of the precisions.
template <typename T> int64_t run(const Arguments &arguments, bool is_forward) {
    if (!check(arguments) || (arguments.rounds && !CAN_ROUND<T>)) return 1;
    if (arguments.batch == 0) return 0;
    const Turns<T> turns(arguments);
    Team team;
    auto take = [&](int64_t part, int64_t parts) {
        Pass<T> pass(arguments, turns, team, part, parts);
        is_forward ? pass.forward() : pass.backward();
    };
    int64_t batch = arguments.batch, threads = arguments.shared ? arguments.threads : std::min(arguments.threads, batch);
    int64_t groups = (batch + threads * GROUP - 1) / (threads * GROUP);
    share(team, threads, arguments.shared ? ONE_EACH : std::min(threads * groups, batch), take);
    return 0;
}

// C [M, N] = A^T B, shared by the threads; see `multiply_transposed`.
template <typename T>
void outer(const T *a, int64_t a_stride, const T *b, T *c, int64_t m_size, int64_t n_size, int64_t k_size, int64_t threads,
           bool rounds) {
    int64_t tiles = (m_size + ROWS - 1) / ROWS;
    Team team;
    share(team, m_size * n_size * k_size < (1 << 18) ? 1 : std::min(threads, tiles), ONE_EACH, [&](int64_t part, int64_t parts) {
        int64_t first = tiles * part / parts * ROWS, last = std::min(tiles * (part + 1) / parts * ROWS, m_size);
        if constexpr (CAN_ROUND<T>)
            if (rounds) return multiply_transposed<Pair>(first, last, n_size, k_size, a, a_stride, b, c);
        multiply_transposed<T>(first, last, n_size, k_size, a, a_stride, b, c);
    });
}

// What changes from step to step of a stream.
struct Step {
    int64_t batch, slots, capacity, seen, threads, remembered;
    const void *x, *h, *c;
    void *h_new, *c_new, *microstates, *keys;
    int64_t *numbers;
    int32_t *live;
    int64_t *reads;
    // The sketch of the buffer that the keys are in, null without; they begin at its slot `begin`.
    void *sketch_codes, *sketch_scales, *sketch_facts;
    void *block_keys;  // of the buffer, which then begins with the first of the keys; null without
    int64_t begin;
    int64_t (*find)(const void *query);  // see `Arguments`; then `remembered` is the room of `live`
};

// One step of a stream: a pass of one step without a backward, with buffers of its own, after which the memory has the
// microstate that was kept. Returns 0, 1 as `run`, or 2 where the input has NaN in it; then nothing has been written.
template <typename T> int64_t step(const Arguments &layer, const Step &s) {
    if (!check(layer)) return 1;
    const T *x = static_cast<const T *>(s.x);
    bool is_nan = false;
#pragma omp simd reduction(| : is_nan)
    for (int64_t j = 0; j < s.batch * layer.input_size; j++) is_nan |= x[j] != x[j];
    if (is_nan) return 2;
    Arguments a = layer;
    a.steps = 1, a.batch = s.batch, a.first_slots = s.slots, a.slots = s.capacity, a.seen = s.seen;
    a.threads = a.shared ? s.threads : std::min(s.threads, s.batch);
    a.k_top = std::min(a.k_top, s.slots + 1);  // there are never more; one at least, without which there is no memory
    a.x = s.x, a.microstates = s.microstates, a.keys = s.keys, a.numbers = s.numbers;
    a.find = s.find, a.places = a.find == nullptr ? a.max_memory : s.remembered;
    a.remembered = s.remembered, a.live = s.live, a.reads = s.reads;
    a.sketch_codes = s.sketch_codes, a.sketch_scales = s.sketch_scales, a.sketch_facts = s.sketch_facts;
    a.sketch_slots = s.capacity, a.sketch_begin = s.begin, a.block_keys = s.block_keys;
    int64_t n = a.n, gate_size = n * visit(Cells{}, a.cell, [](auto cell) { return cell.gates; });
    int64_t state_size = s.batch * n;
    static thread_local std::vector<T> buffers;
    static thread_local std::vector<int32_t> selected;
    int64_t reads = s.batch * a.k_top, keys = s.batch * a.key_size;
    buffers.resize(state_size * 8 + 2 * s.batch * gate_size + keys + 2 * reads + 2 * s.batch);
    selected.resize(reads);
    T *free = buffers.data();
    auto take = [&](int64_t size) { return std::exchange(free, free + size); };
    T *store = take(2 * state_size), *c = take(2 * state_size);
    memcpy(store, s.h, state_size * sizeof(T));
    if (s.c != nullptr) memcpy(c, s.c, state_size * sizeof(T));
    a.store = store, a.c = c, a.gates = take(s.batch * gate_size), a.hidden_gates = take(s.batch * gate_size);
    a.hidden_new = take(state_size), a.h_hat = take(state_size), a.summary = take(state_size);
    a.mapped = take(state_size), a.query = take(keys);
    a.weights = take(reads), a.scores = take(reads), a.norms = take(s.batch), a.query_scale = take(s.batch);
    a.selected = selected.data();
    run<T>(a, true);
    memcpy(s.h_new, store + state_size, state_size * sizeof(T));
    if (s.c_new != nullptr) memcpy(s.c_new, c + state_size, state_size * sizeof(T));
    return 0;
}

// Whether products can round their factors to bfloat16 (`Arguments::rounds`).
extern "C" bool sab_has_bfloat16() { return CAN_ROUND<float>; }
// `sab_pack_float` for these, [panel, K / 2, COLUMNS] of four bytes.
extern "C" void sab_pack_bfloat16([[maybe_unused]] const float *b, [[maybe_unused]] int64_t stride,
                               [[maybe_unused]] int64_t k_size, [[maybe_unused]] int64_t n_size,
                               [[maybe_unused]] bool transposed, [[maybe_unused]] Pair *packed) {
#if defined(SAB_BFLOAT16)
    pack(b, stride, k_size, n_size, transposed, packed);
#endif
}

extern "C" int64_t sab_step_size() { return sizeof(Step); }
extern "C" int64_t sab_arguments_size() { return sizeof(Arguments); }

// The names of all parts of a kind in the order of their indices, separated by spaces; null for an unknown kind.
extern "C" const char *sab_parts(const char *kind) {
    static const std::string cells = Cells::names(), scorers = Scorers::names(), weightings = Weightings::names(),
                             incorporations = Incorporations::names();
    if (strcmp(kind, "cell") == 0) return cells.c_str();
    if (strcmp(kind, "scorer") == 0) return scorers.c_str();
    if (strcmp(kind, "weighting") == 0) return weightings.c_str();
    if (strcmp(kind, "incorporation") == 0) return incorporations.c_str();
    return nullptr;
}

// Selects by product as a pass does, for tests: the k_top best of `used` keys, which are sketched or not. Returns how many
// keys were scored.
template <typename T>
int64_t select(const T *keys, const T *query, int64_t used, int64_t d, int64_t k_top, bool sketched, T *scores,
               int32_t *slots) {
    Selector<T> selector(used);
    if (sketched) selector.sketches.resize(1, used, d);
    for (int64_t slot = 0; sketched && slot < used; slot++) selector.sketches.add(0, slot, keys + slot * d);
    Best<T> best{k_top, scores, slots};
    return selector.select_by_product(0, keys, query, used, d, best, false);
}

// Sketches the first keys of a buffer [row, slot, d] with room for so many slots.
template <typename T>
void sketch(const T *keys, int64_t rows, int64_t used, int64_t slots, int64_t d, void *codes, void *scales, void *facts) {
    Sketches<T> sketches;
    sketches.view(codes, scales, facts, 0, slots, d, 0);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t slot = 0; slot < used; slot++) sketches.add(row, slot, keys + (row * slots + slot) * d);
}

// Makes the keys of the blocks of the first keys of such a buffer.
template <typename T>
void make_blocks(const T *keys, int64_t rows, int64_t used, int64_t slots, int64_t d, int64_t smallest, void *block_keys) {
    Blocks<T> blocks;
    blocks.view(block_keys, 0, slots, d, smallest, 0);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t slot = 0; slot < used; slot++) blocks.add(row, slot, keys + row * slots * d);
}

#define EXPORT(TYPE)                                                                                                   \
    extern "C" int64_t sab_columns_##TYPE() { return Panel<TYPE>::COLUMNS; }                                           \
    extern "C" void sab_pack_##TYPE(const TYPE *b, int64_t stride, int64_t k_size, int64_t n_size, bool transposed,     \
                                    TYPE *packed) {                                                                    \
        pack(b, stride, k_size, n_size, transposed, packed);                                                           \
    }                                                                                                                  \
    extern "C" void sab_outer_##TYPE(const TYPE *a, int64_t a_stride, const TYPE *b, TYPE *c, int64_t m_size,            \
                                     int64_t n_size, int64_t k_size, int64_t threads, bool rounds) {                  \
        outer(a, a_stride, b, c, m_size, n_size, k_size, threads, rounds);                                             \
    }                                                                                                                  \
    extern "C" int64_t sab_forward_##TYPE(const Arguments *arguments) { return run<TYPE>(*arguments, true); }          \
    extern "C" int64_t sab_backward_##TYPE(const Arguments *arguments) { return run<TYPE>(*arguments, false); }         \
    extern "C" int64_t sab_fewest_sketched_##TYPE(const Arguments *layer) { return fewest_sketched<TYPE>(*layer); }     \
    extern "C" void sab_sketch_##TYPE(const TYPE *keys, int64_t rows, int64_t used, int64_t slots, int64_t d,            \
                                      void *codes, void *scales, void *facts) {                                       \
        sketch(keys, rows, used, slots, d, codes, scales, facts);                                                      \
    }                                                                                                                  \
    extern "C" int64_t sab_block_room_##TYPE(int64_t slots, int64_t smallest) { return Blocks<TYPE>::room(slots, smallest); } \
    extern "C" void sab_blocks_##TYPE(const TYPE *keys, int64_t rows, int64_t used, int64_t slots, int64_t d,            \
                                      int64_t smallest, void *block_keys) {                                           \
        make_blocks(keys, rows, used, slots, d, smallest, block_keys);                                                \
    }                                                                                                                  \
    extern "C" int64_t sab_select_##TYPE(const TYPE *keys, const TYPE *query, int64_t used, int64_t d, int64_t k_top,      \
                                         bool sketched, TYPE *scores, int32_t *slots) {                                \
        return select(keys, query, used, d, k_top, sketched, scores, slots);                                          \
    }                                                                                                                  \
    extern "C" int64_t sab_step_##TYPE(const Arguments *layer, const Step *now) { return step<TYPE>(*layer, *now); }

EXPORT(float)
EXPORT(double)
