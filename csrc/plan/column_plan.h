// How the columns of (batch, rows, channels) memory are cut and who works on them; make_column_plan.h decides.
//
// The reduction tree is a function of rows, channels, groups and the element size alone. Channels are cut into strips of
// whole groups, `lanes` threads side by side on a row of one; rows into pieces, of which a thread holds `slots` vectors. A
// thread takes the statistics of what it holds; those of a piece of a strip (a slab is a strip of one batch entry), then of
// a slab's pieces unite in a fixed order. The regime says only which blocks do the work, so that the bits of a sample
// depend neither on the batch nor on the GPU.
#pragma once

#include <cstdint>

#include "plan/plan.h"

namespace normswap {

struct ColumnPlan {
  Regime regime;        // block (a slab is one piece), cluster, split
  int vec;              // channels of 16 bytes, or 1
  int width;            // channels of a strip; the last one may be narrower
  int groups;           // of a strip
  int lanes;            // vectors of a strip
  int log_side;         // rows that a block has side by side
  int threads;          // of a block
  int parts;            // statistics a thread hands on: vec over the neighbours that surely share a group
  int across;           // of a group, by the threads of a row
  int log_uniting;      // threads that unite those of a group
  int log_uniting_across;  // of them side by side on a row
  int slots;            // vectors a thread holds of a piece
  int log_sharing;      // threads that unite a group's pieces
  int64_t strips;
  int64_t piece_rows, pieces;  // of a slab
  int64_t items;        // pieces, in all
  int64_t grid;         // blocks (split: of the statistics)
  int shared;           // bytes of dynamic shared memory a block
  bool overlap;         // see LaunchShape
};

constexpr int kColumnThreads = 512;   // of a block, at most
constexpr int kColumnBlocks = 2;      // on a multiprocessor
constexpr int kSplitThreads = 256;    // of a block that reads what no cluster holds, and of all that store it (split)
constexpr int kSplitBlocks = 3;       // on a multiprocessor
constexpr int kColumnSlots = 8;       // vectors that a thread loads at once, at most

inline int64_t power_of_two_from(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr int log_of(int64_t power_of_two) { return power_of_two > 1 ? 1 + log_of(power_of_two / 2) : 0; }

// Room for a row of statistics (two floats each): more than there are, so that not all rows start in the same bank, but
// for the many short ones of narrow strips.
inline int sums_of_row(const ColumnPlan& p) {
  return p.parts * p.lanes + (p.parts == 1 ? 1 : p.lanes < 3 ? 0 : 2);
}

// Room for a parameter of a strip's channels: a power of two, of at least 16 bytes.
inline int log_parameters(const ColumnPlan& p) {
  const int room = log_of(power_of_two_from(p.width));
  return room < 2 ? 2 : room;
}

// Bytes of `arrays` of them.
inline int parameter_bytes(const ColumnPlan& p, int arrays) {
  return arrays * 4 << log_parameters(p);
}

// Bytes of scratch memory: a piece leaves two floats a group, then a slab.
inline int64_t column_workspace_bytes(const ColumnPlan& p) {
  return p.regime == Regime::split ? p.items / p.pieces * p.groups * (p.pieces + 1) * 8 : 0;
}

}  // namespace normswap
