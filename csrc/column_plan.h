// How the columns of (batch, rows, channels) memory are cut and who works on them: pure host code, called by the launchers
// and, through normswap_column_plan, by tests.
//
// The reduction tree is a function of rows, channels, groups and the element size alone. Channels are cut into strips of
// whole groups, `lanes` threads side by side on a row of one; rows into pieces, of which a thread holds `slots` vectors. A
// thread takes the statistics of what it holds; those of a piece of a strip (a slab is a strip of one batch entry), then of
// a slab's pieces unite in a fixed order. The regime says only which blocks do the work, so that the bits of a sample
// depend neither on the batch nor on the GPU.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "row_plan.h"

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
constexpr int kColumnSlots = 8;       // vectors a thread holds, at most
constexpr int kInboxBytes = 16;       // of shared memory, besides (block, cluster)
constexpr int kColumnStripBytes = 256;  // of a row
constexpr int kApplyStripBytes = 512;   // of a row, where nothing but the width matters

inline int64_t power_of_two_from(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

constexpr int log_of(int64_t power_of_two) { return power_of_two > 1 ? 1 + log_of(power_of_two / 2) : 0; }

inline int common_divisor(int64_t a, int64_t b) { return static_cast<int>(b == 0 ? a : common_divisor(b, a % b)); }

// Strips at least `bytes` wide; false where a group is too wide for the threads of a block.
inline bool cut_columns(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, int64_t bytes, ColumnPlan* p) {
  const int64_t group = channels / num_groups;
  const int full = 16 / itemsize;
  p->vec = channels % full == 0 ? full : 1;
  const int fold = common_divisor(p->vec, group);
  const int64_t unit = group / fold * p->vec;  // the fewest channels that are whole groups and whole vectors
  if (unit / p->vec > kColumnThreads) return false;
  // Few rows want wide strips, or threads would have nothing to do.
  const int64_t fewest = kColumnThreads / power_of_two_from(rows < kColumnThreads ? rows : kColumnThreads);
  int64_t vectors = bytes / (p->vec * itemsize);
  vectors = vectors < fewest ? fewest : vectors;
  vectors = ceil_div(vectors * p->vec, unit) * unit / p->vec;
  vectors = vectors < channels / p->vec ? vectors : channels / p->vec;
  vectors = vectors < kColumnThreads ? vectors : kColumnThreads / (unit / p->vec) * (unit / p->vec);
  const int64_t room = power_of_two_from(vectors), units = room * p->vec / unit;
  p->width = static_cast<int>(units * unit < channels ? units * unit : channels);
  p->lanes = p->width / p->vec;
  p->groups = static_cast<int>(p->width / group);
  p->parts = p->vec / fold;
  p->across = static_cast<int>(group * p->parts / p->vec);
  p->strips = ceil_div(channels, p->width);
  const int64_t side = kColumnThreads / power_of_two_from(p->lanes);
  p->log_side = log_of(side);
  p->threads = static_cast<int>(ceil_div(p->lanes * side, 32) * 32);
  p->slots = 1;
  while (p->slots < kColumnSlots && ceil_div(rows, p->slots * side) > kMaxCluster) p->slots *= 2;
  p->piece_rows = p->slots * side;
  p->pieces = ceil_div(rows, p->piece_rows);
  // As many as there are for all groups of a strip at once.
  const int64_t row = power_of_two_from(p->across);
  int64_t uniting = 1;
  while (uniting < 32 && uniting < row * side && 2 * uniting * p->groups <= p->threads) uniting *= 2;
  p->log_uniting = log_of(uniting);
  p->log_uniting_across = log_of(row < uniting ? row : uniting);
  // A lane for each of the few pieces that a cluster has, and more where there are many.
  const int64_t each = power_of_two_from(ceil_div(p->pieces, 16));
  p->log_sharing = log_of(each < kMaxCluster ? kMaxCluster : each < 32 ? each : 32);
  return true;
}

// The wider the faster the memory (64 bytes: 62% of the rate of a copy, 128: 90%, 256: 95%), but a slab that fits a
// cluster is read only once.
inline bool cut_for_statistics(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  for (const int64_t bytes : {kColumnStripBytes, kColumnStripBytes / 2, kColumnStripBytes / 4}) {
    if (!cut_columns(rows, channels, num_groups, itemsize, bytes, p)) return false;
    if (p->pieces <= kMaxCluster) return true;
  }
  return cut_columns(rows, channels, num_groups, itemsize, kColumnStripBytes, p);
}

// Room for a row of statistics (two floats each): more than there are, so that not all rows start in the same bank, but
// for the many short ones of narrow strips.
inline int sums_of_row(const ColumnPlan& p) {
  return p.parts * p.lanes + (p.parts == 1 ? 1 : p.lanes < 3 ? 0 : 2);
}

// Statistics that the threads of a block hand on.
inline int block_sums(const ColumnPlan& p) { return sums_of_row(p) << p.log_side; }

// Bytes of shared memory: a piece and those statistics (split).
inline int64_t column_shared(const ColumnPlan& p, int itemsize) {
  return static_cast<int64_t>(p.slots) * p.threads * p.vec * itemsize + block_sums(p) * 8;
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

// Also three parameters a channel and what blocks exchange a group (block, cluster).
inline int64_t resident_shared(const ColumnPlan& p, int itemsize) {
  return column_shared(p, itemsize) + parameter_bytes(p, 3) + p.groups * p.pieces * 8;
}

// The plan for statistics and apply; `regime` other than automatic asks for that one. Returns false when such columns
// cannot be done in it, or at all.
inline bool make_column_plan(int64_t batch, int64_t rows, int64_t channels, int64_t num_groups, int itemsize,
                             const Gpu& gpu, Regime regime, ColumnPlan* plan) {
  ColumnPlan p{};
  if (!cut_for_statistics(rows, channels, num_groups, itemsize, &p)) return false;
  const int64_t slabs = batch * p.strips;
  p.items = slabs * p.pieces;
  const int64_t resident = resident_shared(p, itemsize), passing = column_shared(p, itemsize);
  const bool fits = resident + kInboxBytes <= gpu.shared;
  const bool fits_block = p.pieces == 1 && fits;
  const bool fits_cluster = gpu.clusters && p.pieces <= kMaxCluster && fits;
  p.regime = regime != Regime::automatic ? regime
             : fits_block                ? Regime::block
             : fits_cluster              ? Regime::cluster
                                         : Regime::split;
  p.shared = static_cast<int>(p.regime == Regime::split ? passing : resident);
  const int64_t at_most = p.regime == Regime::split ? gpu.multiprocessors * static_cast<int64_t>(kColumnBlocks) : p.items;
  p.grid = p.items < at_most ? p.items : at_most;
  p.overlap = gpu.overlap;
  const bool possible = p.regime == Regime::block     ? fits_block
                        : p.regime == Regime::cluster ? fits_cluster
                                                      : p.regime == Regime::split && passing <= gpu.shared;
  *plan = p;
  return possible && p.items <= 0x7fffffff;
}

// The plan for apply alone, with statistics known before.
inline bool make_apply_plan(int64_t rows, int64_t channels, int itemsize, ColumnPlan* plan) {
  ColumnPlan p{};
  if (!cut_columns(rows, channels, channels, itemsize, kApplyStripBytes, &p)) return false;
  p.items = p.grid = p.strips * p.pieces;
  *plan = p;
  return p.items <= 0x7fffffff;
}

// Bytes of scratch memory: a piece leaves two floats a group, then a slab.
inline int64_t column_workspace_bytes(const ColumnPlan& p) {
  return p.regime == Regime::split ? p.items / p.pieces * p.groups * (p.pieces + 1) * 8 : 0;
}

}  // namespace normswap
