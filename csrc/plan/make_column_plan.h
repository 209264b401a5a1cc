// Makes the plans of column_plan.h: pure host code, called by the launchers and, through normswap_column_plan, by tests.
#pragma once

#include <initializer_list>

#include "plan/column_plan.h"

namespace normswap {

constexpr int kColumnStripBytes = 256;       // of a row
constexpr int kApplyStripBytes = 512;   // of a row, where nothing but the width matters
constexpr int kInboxBytes = 16;         // of shared memory, besides (block, cluster)
constexpr int kReservedBytes = 1024;    // of shared memory, besides, which a multiprocessor needs for a block
constexpr int kSplitBytes = 228 * 1024 / kSplitBlocks - kReservedBytes;  // of a block's that an H100 has room for

// How many threads a block has, at most, and vectors a thread. Of few threads with many vectors a multiprocessor has three
// blocks, of which one loads while another stores.
struct BlockSize {
  int threads, slots;
};
constexpr BlockSize kWideBlock{kColumnThreads, 8}, kDeepBlock{256, 16}, kSmallBlock{128, 16};
constexpr BlockSize kSplitBlock{kSplitThreads, 16};
constexpr int64_t kFewRows = 64;  // for small blocks

inline int common_divisor(int64_t a, int64_t b) { return static_cast<int>(b == 0 ? a : common_divisor(b, a % b)); }

// Strips at least `bytes` wide; false where a group is too wide for the threads of a block.
inline bool cut_columns(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, int64_t bytes, int threads,
                        ColumnPlan* p) {
  const int64_t group = channels / num_groups;
  const int full = 16 / itemsize;
  p->vec = channels % full == 0 ? full : 1;
  const int fold = common_divisor(p->vec, group);
  const int64_t unit = group / fold * p->vec;  // the fewest channels that are whole groups and whole vectors
  if (unit / p->vec > threads) return false;
  // Few rows want wide strips, or threads would have nothing to do.
  const int64_t fewest = threads / power_of_two_from(rows < threads ? rows : threads);
  int64_t vectors = bytes / (p->vec * itemsize);
  vectors = vectors < fewest ? fewest : vectors;
  vectors = ceil_div(vectors * p->vec, unit) * unit / p->vec;
  vectors = vectors < channels / p->vec ? vectors : channels / p->vec;
  vectors = vectors < threads ? vectors : threads / (unit / p->vec) * (unit / p->vec);
  const int64_t room = power_of_two_from(vectors), units = room * p->vec / unit;
  p->width = static_cast<int>(units * unit < channels ? units * unit : channels);
  p->lanes = p->width / p->vec;
  p->groups = static_cast<int>(p->width / group);
  p->parts = p->vec / fold;
  p->across = static_cast<int>(group * p->parts / p->vec);
  p->strips = ceil_div(channels, p->width);
  const int64_t side = threads / power_of_two_from(p->lanes);
  p->log_side = log_of(side);
  p->threads = static_cast<int>(ceil_div(p->lanes * side, 32) * 32);
  return true;
}

// Pieces of so many vectors a thread.
inline void cut_rows(int64_t rows, int64_t slots, ColumnPlan* p) {
  const int64_t side = int64_t{1} << p->log_side;
  p->slots = static_cast<int>(slots);
  p->piece_rows = slots * side;
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
}

// Vectors that a thread would hold of a slab in one piece.
inline int64_t depth(int64_t rows, const ColumnPlan& p) { return ceil_div(rows, int64_t{1} << p.log_side); }

inline void cut_rows_wide(int64_t rows, int most, ColumnPlan* p) {
  int64_t slots = 1;
  while (slots < most && ceil_div(depth(rows, *p), slots) > kMaxCluster) slots *= 2;
  cut_rows(rows, slots, p);
}

// Statistics that the threads of a block hand on.
inline int block_sums(const ColumnPlan& p) { return sums_of_row(p) << p.log_side; }

// Bytes of shared memory: a piece and those statistics (split).
inline int64_t column_shared(const ColumnPlan& p, int itemsize) {
  return static_cast<int64_t>(p.slots) * p.threads * p.vec * itemsize + block_sums(p) * 8;
}

// Slabs that no cluster holds. What a piece takes besides its vectors is much: as many of these as leave room for the blocks
// of a multiprocessor.
inline bool cut_split(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  const auto [threads, most] = kSplitBlock;
  if (!cut_columns(rows, channels, num_groups, itemsize, kColumnStripBytes, threads, p)) return false;
  cut_rows_wide(rows, most, p);
  while (p->slots > 1 && column_shared(*p, itemsize) > kSplitBytes) cut_rows(rows, p->slots - 1, p);
  return true;
}

// Large blocks, as many a slab as a cluster has where it can. The wider the strips the faster the memory (64 bytes: 62% of
// the rate of a copy, 128: 90%, 256: 95%), but a slab that fits a cluster is read only once.
inline bool cut_wide(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  const auto [threads, most] = kWideBlock;
  for (const int64_t bytes : {kColumnStripBytes, kColumnStripBytes / 2, kColumnStripBytes / 4, kColumnStripBytes}) {
    if (!cut_columns(rows, channels, num_groups, itemsize, bytes, threads, p)) return false;
    cut_rows_wide(rows, most, p);
    if (p->pieces <= kMaxCluster) return true;
  }
  ColumnPlan split{};
  if (cut_split(rows, channels, num_groups, itemsize, &split)) *p = split;
  return true;
}

// Few blocks a slab. Returns false where slabs are too long for a cluster.
inline bool cut_deep_by(BlockSize block, int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  ColumnPlan wide{};
  const int most = block.slots;
  if (!cut_columns(rows, channels, num_groups, itemsize, kColumnStripBytes, block.threads, &wide)) return false;
  if (!cut_columns(rows, channels, num_groups, itemsize, kColumnStripBytes / 2, block.threads, p)) return false;
  const int64_t deep = depth(rows, *p), wide_deep = depth(rows, wide);
  // Wide strips in one piece, unless those of a sample are few and narrow ones are not too small.
  if (wide_deep <= most && (wide.strips >= kMaxCluster || deep < most / 4)) {
    *p = wide;
    cut_rows(rows, wide_deep, p);
    return true;
  }
  const int64_t pieces = deep <= most / 2 ? 1 : deep <= 2 * most ? 2 : kMaxCluster;
  cut_rows(rows, ceil_div(deep, pieces), p);
  return p->slots <= most;
}

// Small blocks: that a block starts and that a cluster waits for its blocks takes longer than what a block of few vectors
// does. Smaller ones where so fewer threads have nothing to do, of few rows, and pieces are no more; large ones where a
// sample has few blocks.
inline bool cut_deep(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  if (!cut_deep_by(kDeepBlock, rows, channels, num_groups, itemsize, p)) return false;
  const bool few = p->pieces > 1 && p->strips * p->pieces < kMaxCluster;
  if (rows > kFewRows && !few) return true;
  ColumnPlan other{};
  const bool fits = cut_deep_by(few ? kWideBlock : kSmallBlock, rows, channels, num_groups, itemsize, &other);
  if (fits && (few || (other.piece_rows < p->piece_rows && other.pieces <= p->pieces))) *p = other;
  return true;
}

// A group that is a channel: BatchNorm's, whose batch is all there is.
inline bool cut_for_statistics(int64_t rows, int64_t channels, int64_t num_groups, int itemsize, ColumnPlan* p) {
  if (num_groups < channels && cut_deep(rows, channels, num_groups, itemsize, p)) return true;
  return cut_wide(rows, channels, num_groups, itemsize, p);
}

// Also three parameters a channel and what blocks exchange a group (block, cluster).
inline int64_t resident_shared(const ColumnPlan& p, int itemsize) {
  return column_shared(p, itemsize) + parameter_bytes(p, 3) + p.groups * p.pieces * 8;
}

// Blocks of the statistics that a multiprocessor has at once (split).
inline int64_t split_blocks(const ColumnPlan& p, int64_t shared, const Gpu& gpu) {
  const int64_t fit = (gpu.shared + kReservedBytes) / (shared + kReservedBytes);
  const int64_t most = p.threads > kSplitThreads ? kColumnBlocks : kSplitBlocks;
  return fit < most ? fit : most;
}

// The plan for the statistics and, unless split, what comes of them; `regime` other than automatic asks for that one. Returns
// false when such columns cannot be done in it, or at all.
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
  const int64_t at_most = p.regime == Regime::split ? gpu.multiprocessors * split_blocks(p, passing, gpu) : p.items;
  p.grid = p.items < at_most ? p.items : at_most;
  p.overlap = gpu.overlap;
  const bool possible = p.regime == Regime::block     ? fits_block
                        : p.regime == Regime::cluster ? fits_cluster
                                                      : p.regime == Regime::split && passing <= gpu.shared;
  *plan = p;
  return possible && p.items <= 0x7fffffff;
}

// The plan for apply alone, with statistics known before: strips are of any channels.
inline bool make_apply_plan(int64_t batch, int64_t rows, int64_t channels, int itemsize, BlockSize block, ColumnPlan* plan) {
  ColumnPlan p{};
  if (!cut_columns(rows, channels, channels, itemsize, kApplyStripBytes, block.threads, &p)) return false;
  cut_rows_wide(rows, block.slots, &p);
  p.items = p.grid = batch * p.strips * p.pieces;
  *plan = p;
  return p.items <= 0x7fffffff;
}

}  // namespace normswap
