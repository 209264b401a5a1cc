// Makes the plans of group_backward_plan.h: pure host code, called by the launcher and, through
// normswap_group_backward_plan and normswap_group_columns_plan, by tests.
#pragma once

#include "plan/group_backward_plan.h"

namespace normswap {

constexpr int kUnitsAPiece = 8;          // of a long line; twice that where no cluster holds a group
constexpr int kEach = 8;                 // vectors that a lane has of a unit, at most; the same
constexpr int kFewLanes = 4;             // that share a unit, at least, if there are so many vectors
constexpr int64_t kSpanBytes = 12800;    // held: of x and dy, up to which a block has several groups
constexpr int kFewThreads = 128;         // held: that a block has at least, if each has a unit; twice that of few blocks
constexpr int kFewBlocks = 2;            // held, on a multiprocessor: rather than several groups for a block
constexpr int kManyBlocks = 8;           // held, on a multiprocessor
constexpr int64_t kHeldBytes = 114688;   // held: that it has by choice, so that two blocks fit in a multiprocessor

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Bytes that a block keeps besides x and dy (see HeldShared).
inline int64_t held_rest(const GroupBackwardPlan& p) {
  const int64_t units = static_cast<int64_t>(p.block_pieces) * p.piece_lines * p.piece_units;
  const int64_t pieces = p.cluster > 1 ? p.group_pieces : p.block_pieces;
  const int64_t groups = p.cluster > 1 ? 1 : p.block_pieces / p.group_pieces;
  return p.block_lines * 16 + units * 8 + pieces * 8 + groups * 8;
}

inline int64_t in_vectors(int64_t bytes) { return ceil_div(bytes, 16) * 16; }

inline int64_t held_bytes(const GroupBackwardPlan& p, const GroupSizes& s) {
  return in_vectors(p.block_elements * s.itemsize) + in_vectors(p.block_elements * s.grad_itemsize) + held_rest(p);
}

// The tree.
inline GroupBackwardPlan cut_groups(const GroupSizes& s) {
  GroupBackwardPlan p{};
  const int full = 16 / s.itemsize;
  const int64_t lines = s.channels / s.num_groups;
  p.vec = s.spatial % full == 0 ? full : s.spatial % 4 == 0 ? 4 : 1;
  // As few lanes as have a line at once: the others have other lines.
  const int64_t vectors = s.spatial / p.vec, fewest = next_power_of_two(vectors < kFewLanes ? vectors : kFewLanes);
  const int64_t wanted = next_power_of_two(ceil_div(vectors, kEach)), lanes = wanted > fewest ? wanted : fewest;
  p.lanes = static_cast<int>(lanes < 32 ? lanes : 32);
  // Passing goes from piece to piece: fewer and larger ones, of which the vectors are on their way ahead for longer.
  const int64_t bytes = lines * s.spatial * (s.itemsize + s.grad_itemsize);
  const int larger = bytes > kMaxCluster * kHeldBytes ? 2 : 1;
  const int64_t each = ceil_div(vectors, p.lanes);
  p.units = static_cast<int>(ceil_div(each, larger * kEach));
  p.each = static_cast<int>(ceil_div(each, p.units));
  p.units = static_cast<int>(ceil_div(each, p.each));  // each of which has some
  p.line_pieces = ceil_div(p.units, larger * kUnitsAPiece);
  p.piece_units = static_cast<int>(ceil_div(p.units, p.line_pieces));
  p.line_pieces = ceil_div(p.units, p.piece_units);
  // As few pieces as have room for their sums, but where no block holds a group as many as a cluster's blocks.
  const int64_t room = kRunsAPiece * 32 / p.lanes / p.piece_units, few = ceil_div(lines, room < 1 ? lines : room);
  const int64_t blocks = next_power_of_two(ceil_div(bytes, kHeldBytes / 16 * 15));  // which hold other things besides
  p.piece_lines = static_cast<int>(p.line_pieces > 1 || room < 1 ? 1 : ceil_div(lines, few > blocks ? few : blocks));
  p.group_pieces = p.line_pieces > 1 ? lines * p.line_pieces : ceil_div(lines, p.piece_lines);
  p.groups = s.batch * s.num_groups;
  return p;
}

inline int multiprocessors_of(const Gpu& gpu) { return gpu.multiprocessors > 0 ? gpu.multiprocessors : 128; }

inline int passing_blocks(const Gpu& gpu) { return kPassingBlocks * multiprocessors_of(gpu); }

// Passing: pieces by which gradients follow sums, of `sets` of so many, with so many of other sets between: so that few
// wait; but no more, so that x and dy still lie in the L2.
inline int64_t lag_of(int64_t sets, int64_t pieces, int64_t between) {
  const int64_t lag = pieces + between, all = sets * pieces;
  return lag < all ? lag : all;
}

// Whole groups for a block; false where a group is more than `bytes`.
inline bool hold_in_block(const GroupSizes& s, const Gpu& gpu, int64_t bytes, GroupBackwardPlan* p) {
  const int64_t lines = s.channels / s.num_groups, elements = lines * s.spatial;
  const int64_t wanted = kSpanBytes / (elements * (s.itemsize + s.grad_itemsize));
  const int64_t most = p->groups / (kFewBlocks * multiprocessors_of(gpu)), possible = wanted < most ? wanted : most;
  int64_t span = possible < 1 ? 1 : possible;
  for (;; span /= 2) {
    p->cluster = 1;
    p->block_pieces = static_cast<int>(span * p->group_pieces);
    p->block_lines = static_cast<int>(span * lines);
    p->block_elements = span * elements;
    p->grid = ceil_div(p->groups, span);
    if (held_bytes(*p, s) <= bytes) return true;
    if (span == 1) return false;
  }
}

// A group for a cluster.
inline bool hold_in_cluster(const GroupSizes& s, const Gpu& gpu, int64_t bytes, GroupBackwardPlan* p) {
  if (!gpu.clusters) return false;
  const int64_t lines = s.channels / s.num_groups;
  const int64_t line = p->line_pieces > 1 ? ceil_div(s.spatial, p->line_pieces) : s.spatial;
  for (int cluster = 2; cluster <= kMaxCluster; cluster *= 2) {
    const int64_t pieces = ceil_div(p->group_pieces, cluster);
    const int64_t piece = p->line_pieces > 1 ? static_cast<int64_t>(p->piece_units) * p->lanes * p->each * p->vec
                                             : p->piece_lines * line;
    p->cluster = cluster;
    p->block_pieces = static_cast<int>(pieces);
    const int64_t covered = p->line_pieces > 1 ? ceil_div(pieces, p->line_pieces) + 1 : pieces * p->piece_lines;
    p->block_lines = static_cast<int>(covered < lines ? covered : lines);
    p->block_elements = pieces * piece;
    p->grid = p->groups * cluster;
    if (pieces * (cluster - 1) < p->group_pieces && held_bytes(*p, s) <= bytes) return true;
  }
  return false;
}

// `regime` other than automatic asks for a way: block, cluster (held) or split (passing). Returns false when it cannot be
// done so.
inline bool make_group_backward_plan(const GroupSizes& s, const Gpu& gpu, Regime regime, GroupBackwardPlan* plan) {
  GroupBackwardPlan p = cut_groups(s);
  const int64_t by_choice = kHeldBytes < gpu.shared ? kHeldBytes : gpu.shared;
  const bool any = regime == Regime::automatic;
  p.held = (any && hold_in_block(s, gpu, by_choice, &p)) || (any && hold_in_cluster(s, gpu, by_choice, &p)) ||
           (regime == Regime::block && hold_in_block(s, gpu, gpu.shared, &p)) ||
           (regime == Regime::cluster && hold_in_cluster(s, gpu, gpu.shared, &p));
  if (p.held) {
    // Few threads where little memory lets many blocks run at once, since each waits for its loads, barriers and stores; but
    // enough that they do not take many units one after the other.
    p.shared = static_cast<int>(held_bytes(p, s));
    const int64_t by_memory = ceil_div(int64_t{2} * kHeldThreads * p.shared, gpu.shared);
    const int64_t all = int64_t{p.block_pieces} * p.piece_lines * p.piece_units * p.lanes;
    const int few = p.grid > int64_t{kManyBlocks} * multiprocessors_of(gpu) ? kFewThreads : 2 * kFewThreads;
    const int64_t at_once = all < few ? all : few;
    const int64_t threads = next_power_of_two(by_memory > at_once ? by_memory : at_once);
    p.threads = static_cast<int>(threads < 64 ? 64 : threads < kHeldThreads ? threads : kHeldThreads);
  } else {
    if (!any && regime != Regime::split) return false;
    p = cut_groups(s);
    p.lag = lag_of(p.groups, p.group_pieces, passing_blocks(gpu));
    p.threads = kPassingThreads;
    p.grid = passing_blocks(gpu);
  }
  *plan = p;
  return p.grid <= 0x7fffffff && 2 * p.groups * p.group_pieces <= 0x7fffffff;
}

// Bytes of scratch memory: those pairs; passing: pairs of sums of the pieces and groups, a ticket and two flags a group.
inline int64_t group_backward_workspace(const GroupBackwardPlan& p, const GroupSizes& s) {
  const int64_t passing = p.held ? 0 : p.groups * (p.group_pieces + 1) * 8 + (1 + 2 * p.groups) * 4;
  return group_line_sums(p, s) * 8 + passing;
}

constexpr int kRowsAThread = 32;
constexpr int64_t kStripBytes = 128;    // of a row of x, by choice
constexpr int kThreadBytes = 448;       // held: of shared memory, a thread
constexpr int64_t kSystemBytes = 1024;  // of a multiprocessor's shared memory, a block
constexpr int kSlabPiecesBetween = 2;   // for each block that runs (see lag_of)

// Of strips about so wide. Returns false where a group is too wide for a block.
inline bool cut_strips(const GroupSizes& s, int64_t strip_bytes, int threads, GroupColumnsPlan* plan) {
  GroupColumnsPlan p{};
  const int full = 16 / s.itemsize;
  const int64_t group = s.channels / s.num_groups;
  p.vec = s.channels % full == 0 ? full : 1;
  int64_t unit = group;  // the fewest channels that are whole groups and whole vectors
  while (unit % p.vec != 0) unit += group;
  if (unit / p.vec > threads) return false;
  p.threads = threads;
  const int64_t most = threads * p.vec / unit * unit, wanted = ceil_div(strip_bytes / s.itemsize, unit) * unit;
  const int64_t width = wanted < most ? wanted : most;
  p.width = static_cast<int>(width < s.channels ? width : s.channels);
  p.lanes = p.width / p.vec;
  const int of_warp = 32 / p.lanes, warps = threads / 32;
  p.side = of_warp > 0 ? warps * of_warp : threads / p.lanes;
  p.half_rows = static_cast<int>(next_power_of_two(of_warp) / 2);
  p.sum_rows = of_warp > 0 ? warps : p.side;
  p.strips = ceil_div(s.channels, p.width);
  p.slabs = s.batch * p.strips;
  *plan = p;
  return true;
}

inline void cut_pieces(const GroupSizes& s, int thread_rows, GroupColumnsPlan* p) {
  p->thread_rows = thread_rows;
  p->piece_rows = p->side * thread_rows;
  p->pieces = ceil_div(s.spatial, p->piece_rows);
  p->bunches = ceil_div(p->pieces, kBunch);
}

// Bytes of a block's shared memory besides x and dy (see ColumnsShared), and what the blocks of a cluster exchange.
inline int64_t columns_rest(const GroupColumnsPlan& p, int64_t pieces) {
  return in_vectors(4 * 6 * ceil_div(p.width, 4) * 4 + 8 * (p.sum_rows + (pieces > 1 ? pieces : 0)) * p.width);
}

// At most so many pieces, each of which a block holds. Returns false where there would be more.
inline bool hold_columns(const GroupSizes& s, int64_t pieces, GroupColumnsPlan* p) {
  const int64_t row = int64_t{p->threads} * p->vec * (s.itemsize + s.kept_itemsize);  // one of each thread
  const int64_t rows = ceil_div(s.spatial, p->side), rest = columns_rest(*p, pieces), room = p->threads * kThreadBytes;
  const int64_t fit = rest < room ? (room - rest) / row : 0;
  const int64_t most = fit < kRowsHeld ? fit : kRowsHeld;
  if (p->vec == 1 || most < 1 || ceil_div(rows, most) > pieces) return false;
  cut_pieces(s, static_cast<int>(ceil_div(rows, ceil_div(rows, most))), p);
  p->held_bytes = static_cast<int>(p->thread_rows * row);
  p->shared = static_cast<int>(columns_rest(*p, p->pieces)) + p->held_bytes;
  return true;
}

// A slab for a block, as wide as a small one holds; or for a cluster of large ones, the fewer the better: they wait for each
// other. Returns false where none holds one.
inline bool hold_strips(const GroupSizes& s, GroupColumnsPlan* plan) {
  bool held = false;
  GroupColumnsPlan p;
  for (int64_t strip = kStripBytes; cut_strips(s, strip, kSmallSlabThreads, &p) && hold_columns(s, 1, &p); strip *= 2) {
    const bool wider = !held || p.width > plan->width;
    if (!wider) break;
    *plan = p;
    held = true;
  }
  const auto in_pieces = [&](int64_t strip, int most) {
    return cut_strips(s, strip, kSlabThreads, plan) && hold_columns(s, most, plan);
  };
  return held || in_pieces(kStripBytes, 2) || in_pieces(kStripBytes / 2, 4) || in_pieces(kStripBytes / 4, 4);
}

// Blocks of so much shared memory that run at once.
inline int64_t held_blocks(const GroupColumnsPlan& p, const Gpu& gpu) {
  const int64_t fit = (gpu.shared + kSystemBytes) / (p.shared + kSystemBytes), most = kSlabBlocks * kSlabThreads / p.threads;
  return (fit < most ? fit : most) * multiprocessors_of(gpu);
}

// `regime`: split asks for passing. Returns false where a group is too wide for a block.
inline bool make_group_columns_plan(const GroupSizes& s, const Gpu& gpu, Regime regime, GroupColumnsPlan* plan) {
  GroupColumnsPlan p;
  bool held = hold_strips(s, &p);
  if (!held) {
    if (!cut_strips(s, kStripBytes, kSlabThreads, &p)) return false;
    cut_pieces(s, kRowsAThread, &p);
  }
  held = held && regime != Regime::split && p.shared <= gpu.shared && (p.pieces == 1 || gpu.clusters);
  const int64_t items = p.slabs * p.pieces, blocks = held_blocks(p, gpu);
  p.blocks = static_cast<int>(p.pieces > 1 || items < blocks ? items : blocks);
  if (!held) {
    p.held_bytes = 0;
    p.shared = static_cast<int>(columns_rest(p, 1));
    p.blocks = passing_blocks(gpu);
    p.lag = lag_of(p.slabs, p.pieces, kSlabPiecesBetween * p.blocks);
  }
  *plan = p;
  return 2 * p.slabs * p.pieces <= 0x7fffffff;
}

inline int64_t group_columns_workspace(const GroupColumnsPlan& p, const GroupSizes& s) {
  const int64_t pairs = s.batch * (s.num_groups + s.channels) + p.slabs * (p.pieces + p.bunches) * p.width;
  return pairs * 8 + (1 + p.slabs * (p.bunches + 2)) * 4;
}

}  // namespace normswap
