// How the backward of a row norm is cut and who works on it: pure host code, called by the launcher and, through
// normswap_row_backward_plan, by tests.
//
// A warp has a chunk of kChunk elements, of one row after the other: so it keeps the weights and the sums of its columns
// in registers. What a row's gradient needs, two sums over the row, is united from its chunks' by a binary tree by index,
// which depends on the row length and the element sizes alone. The rows are cut into pieces, whose column sums are added
// in the order of the pieces: which rows make a piece, and the order within it, follow from rows, columns and element
// sizes. Nothing that the bits depend on follows from the GPU: that says only how many rows are on their way at once,
// and whether x and dy are read once, or twice.
#pragma once

#include "plan/plan.h"

namespace normswap {

// Warps of a block by choice: what it takes to keep the memory busy; and at most, with registers for 32 elements a lane.
constexpr int kWarpsBackward32 = 8;
constexpr int kWarpsBackward16 = 12;
constexpr int kMaxWarpsBackward = 12;
constexpr int kWarpsBackwardLean = 16;  // of 16 bits, where no sums for a bias take registers
constexpr int kSpread = 132;          // blocks that pieces are made for: an H100's multiprocessors
constexpr int kSpreadClusters = 120;  // the same in large clusters, which leave some out: 15 of eight run at once
constexpr int kMaxSlotsBackward = 3;
constexpr int kSumsInFlight = 4;  // rows of which the sums may be under way between warps
constexpr int kExchangeBytes = 4096;  // of shared memory, for these

// Two passes: warps of a block, of which so many share a multiprocessor.
constexpr int kWarpsTwoPasses = 4;
constexpr int kBlocksTwoPasses = 3;

// Rows of at most so many elements: eight lanes a row, four rows a warp; but `with` something around them.
constexpr int kMaxEightLanes = 256;

struct BackwardRows {
  int64_t rows, cols;
  int itemsize, grad_itemsize;  // of x, dy
  bool with;                    // an activation, a gradient of the sum, or one of the residual apart
  bool lean;                    // no bias
  bool slopes;                  // an activation, whose derivative is not 0 or 1 everywhere
  bool sums;                    // a gradient of the sum
};

// Whether dy of 16 bits is taken with x of 32: of layer_norm, without an activation, where rows of both are at multiples of
// 16 bytes.
inline bool takes_narrow_grad(const BackwardRows& of) { return !of.lean && of.cols * of.grad_itemsize % 16 == 0; }

struct BackwardPlan {
  bool with;
  int lanes;      // that share a chunk: 8 or 32
  int chunk_len;  // kChunk, unless the row is shorter
  int64_t chunks;
  int blocks_a_row;  // one pass: of a cluster; two: blocks along the row
  int block_chunks;  // chunks of a row that a block has
  int teams;         // warps of a block, or as many as have the chunks, that take rows in turn
  int warps;         // of a block
  int64_t rows_a_piece, pieces;
  bool one_pass;
  int slots;  // rows that a warp has on chip
  int lag;    // turns between a row's sums and its gradient, while the sums are under way
  bool keeps;  // of an activation, if there is one: what comes of dy takes its place until the gradient is made
  bool wide;   // in float32: dy is of 16 bits, its rows begin at vectors, and as many of them are on chip as without
  int x_bytes, slot_bytes, shared;
  int sum_bytes;  // of a slot, for a gradient of the sum; 0: it is read where it is added
  int64_t grid;
  bool overlap;  // see LaunchShape
};

// Which rows make a piece, and who has which chunk: as if every GPU had clusters.
inline void partition(const BackwardRows& of, BackwardPlan* p) {
  p->lanes = of.cols <= kMaxEightLanes && !of.with ? 8 : 32;
  p->chunk_len = static_cast<int>(of.cols < kChunk ? of.cols : kChunk);
  p->chunks = ceil_div(of.cols, kChunk);
  const int sixteen = of.lean && !of.with ? kWarpsBackwardLean : kWarpsBackward16;
  const int choice = of.itemsize == 4 ? kWarpsBackward32 : sixteen;
  p->one_pass = p->chunks <= kMaxCluster * kMaxWarpsBackward;
  p->blocks_a_row = p->teams = 1;
  int64_t spread = kSpread;
  if (p->one_pass) {
    const int most = choice > kMaxWarpsBackward ? choice : kMaxWarpsBackward;
    while (p->chunks > p->blocks_a_row * (p->blocks_a_row < kMaxCluster ? choice : most)) {
      p->blocks_a_row *= 2;
    }
    spread = (p->blocks_a_row <= 2 ? kSpread : kSpreadClusters) / p->blocks_a_row;
    p->block_chunks = static_cast<int>(ceil_div(p->chunks, p->blocks_a_row));
    p->blocks_a_row = static_cast<int>(ceil_div(p->chunks, p->block_chunks));  // none has nothing to do
    if (p->blocks_a_row == 1) p->teams = choice / p->block_chunks;
  } else {
    spread = kBlocksTwoPasses * kSpread / ceil_div(p->chunks, kWarpsTwoPasses);
    if (spread < 1) spread = 1;
  }
  const int64_t at_once = p->teams * (32 / p->lanes), turns = ceil_div(ceil_div(of.rows, at_once), spread);
  p->rows_a_piece = turns * at_once;
  p->pieces = ceil_div(of.rows, p->rows_a_piece);
}

// What a warp's rows of one turn take in shared memory: x, dy, four floats a row and, if it is to be there (`sums`), a gradient
// of the sum.
inline void size_slot(const BackwardRows& of, bool sums, BackwardPlan* p) {
  const int64_t elements = static_cast<int64_t>(p->chunk_len) * (32 / p->lanes);
  const auto room = [](int64_t bytes) { return static_cast<int>(ceil_div(bytes, 16) * 16 + 32); };
  p->x_bytes = room(elements * of.itemsize);
  p->sum_bytes = sums ? p->x_bytes : 0;
  const int of_grad = p->wide ? static_cast<int>(sizeof(float)) : of.grad_itemsize;
  p->slot_bytes = p->x_bytes + room(elements * of_grad) + p->sum_bytes + 64;
}

inline void make_two_passes(BackwardPlan* p) {
  p->one_pass = p->keeps = p->wide = false;
  p->teams = 1;
  p->block_chunks = p->warps = kWarpsTwoPasses;
  p->blocks_a_row = static_cast<int>(ceil_div(p->chunks, kWarpsTwoPasses));
}

// At the end column sums of all teams take the place of rows: four bytes an element.
inline int column_bytes(const BackwardPlan& p) {
  const int elements = p.lanes == 8 ? 4 * p.chunk_len : p.chunk_len;
  return p.warps * elements * static_cast<int>(sizeof(float));
}

// Rows of each warp that so much shared memory has room for: one at least.
inline int slots_within(int bytes, const BackwardPlan& p) {
  const int most = bytes / (p.warps * p.slot_bytes);
  return most < 1 ? 1 : most < kMaxSlotsBackward ? most : kMaxSlotsBackward;
}

// Slots with a gradient of the sum, unless then only one row of each warp has room: how often x and dy are read, and in which
// order sums are added, is as without it.
inline void size_slots(const BackwardRows& of, int bytes, BackwardPlan* p) {
  size_slot(of, of.sums, p);
  if (of.sums && slots_within(bytes, *p) < 2) size_slot(of, false, p);
}

// The plan for at least one row of at least one element; `passes`: 0, or 1 or 2 to force them. Returns false where there
// are too many blocks, or the rows cannot be done in so many passes.
inline bool make_backward_plan(const BackwardRows& of, const Gpu& gpu, int passes, BackwardPlan* plan) {
  BackwardPlan p{};
  p.overlap = gpu.overlap;
  p.with = of.with;
  partition(of, &p);
  p.keeps = of.with && (!of.slopes || of.grad_itemsize == 4);
  p.warps = p.teams * p.block_chunks;
  const int room = gpu.shared - kExchangeBytes;
  if (p.one_pass) size_slots(of, room, &p);
  const bool alone = p.blocks_a_row == 1 || gpu.clusters;
  const bool fits = p.warps * p.slot_bytes <= room && column_bytes(p) <= room;
  const bool possible = p.one_pass && alone && fits;
  if (passes == 1 ? !possible : passes == 2 && p.chunks == 1) return false;
  if (!possible || passes == 2) make_two_passes(&p);
  const int budget = p.one_pass ? room : gpu.shared / kBlocksTwoPasses - kExchangeBytes;
  if (!p.one_pass) size_slots(of, budget, &p);
  p.slots = slots_within(budget, p);
  if (p.one_pass && of.with && !p.keeps && of.cols * of.grad_itemsize % 16 == 0) {
    BackwardPlan wide = p;
    wide.keeps = wide.wide = true;
    size_slot(of, p.sum_bytes > 0, &wide);
    if (wide.warps * wide.slot_bytes <= budget && slots_within(budget, wide) == p.slots) p = wide;
  }
  p.lag = p.one_pass && p.chunks > 1 && p.slots > 2 ? 1 : 0;
  const int slots = p.slots * p.warps * p.slot_bytes, columns = column_bytes(p);
  p.shared = slots > columns ? slots : columns;
  p.grid = p.pieces * p.blocks_a_row;
  *plan = p;
  return p.shared <= room && p.grid <= 0x7fffffff;
}

// Floats of scratch memory: partial sums of columns, of weights and biases; two passes: two sums a chunk, two a row.
inline int64_t backward_partials(const BackwardPlan& plan, const BackwardRows& of) { return plan.pieces * 2 * of.cols; }
inline int64_t backward_sums(const BackwardPlan& plan, const BackwardRows& of) {
  return plan.one_pass ? 0 : of.rows * 2 * (plan.chunks + 1);
}

}  // namespace normswap
