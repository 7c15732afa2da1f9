// Which steps keep a microstate, where the chain is cut, and where hidden states and microstates are stored.
//
// Steps are counted from 0 within a pass; `seen` steps came before it. The rows of `store` hold the first_slots
// microstates from before the pass, then, from first_row on, the initial hidden state and the one after each step. In a
// step of a stream all microstates are elsewhere, so first_row is 0.
#pragma once

#include <cstdint>

class Schedule {
    const int64_t k_top, k_att, k_trunc, seen, first_slots, first_row, first_kept;

  public:
    Schedule(int64_t k_top, int64_t k_att, int64_t k_trunc, int64_t seen, int64_t first_slots, int64_t first_row)
        : k_top(k_top), k_att(k_att), k_trunc(k_trunc), seen(seen), first_slots(first_slots), first_row(first_row),
          first_kept(k_att - 1 - seen % k_att) {}

    // Whether the hidden state of step t is kept.
    bool keeps(int64_t t) const { return k_top > 0 && (seen + t + 1) % k_att == 0; }
    // The number, from the very first step, of the microstate that step t keeps.
    int64_t number(int64_t t) const { return (seen + t + 1) / k_att - 1; }
    // Whether no gradient flows from step t along the chain to the one before; k_trunc is 0 where nothing is cut.
    bool cuts_before(int64_t t) const { return k_trunc > 0 && seen + t > 0 && (seen + t) % k_trunc == 0; }
    // How many slots are in use when step t reads; where step t keeps, this is also the slot that it fills.
    int64_t slots_at(int64_t t) const { return k_top == 0 ? 0 : first_slots + (seen + t) / k_att - seen / k_att; }
    // The row of `store` with the hidden state after step t; t = -1 is the initial one.
    int64_t stored(int64_t t) const { return first_row + 1 + t; }
    // The row of `store` with the microstate of a slot.
    int64_t microstate(int64_t slot) const {
        return slot < first_slots ? slot : stored(first_kept + (slot - first_slots) * k_att);
    }
};
