// How the backward of group_norm is cut and who works on it: pure host code, called by the launcher and, through
// normswap_group_backward_plan, by tests.
//
// Contiguous input. A line is a channel of a sample: `spatial` elements, `vectors` vectors, of which `lanes` neighbouring
// lanes take a unit at a time. A piece is several whole lines of a group, or `piece_units` units of a line that is longer. The
// sums are united lane by lane to those of a unit, of a line's units in a piece, of a piece's lines, of a group's pieces:
// a tree that sizes and dtypes fix, whoever works on it. Two ways:
//   held    a block, or a cluster, holds x and dy of whole groups in shared memory: each is read once
//   passing blocks take pieces one after the other, for their sums and later, when those of the group are known and while
//           x and dy still lie in the L2, for the gradients
//
// Channels last. A slab is a strip of whole groups of a sample, a piece so many of its rows. Held: a block has a piece, a
// cluster a slab.
#pragma once

#include "plan/row_plan.h"

namespace normswap {

struct GroupSizes {
  int64_t batch, channels, spatial, num_groups;
  int itemsize, grad_itemsize;  // of x, of dy
};

struct GroupBackwardPlan {
  bool held;
  int vec, lanes, each;  // elements of a vector; lanes that share a unit; vectors that one has of it, at most
  int units;             // of a line
  int piece_lines, piece_units;
  int64_t line_pieces;   // pieces of a line that has several, else 1
  int64_t group_pieces;
  int64_t groups;        // of all samples
  int block_pieces;      // held: that a block has
  int cluster;           // held: blocks of a cluster
  int block_lines;       // held: of which a block has elements, at most
  int64_t block_elements;
  int threads, shared;
  int64_t lag;   // passing: pieces by which the gradients follow the sums
  int64_t grid;
};

constexpr int kUnitsAPiece = 8;          // of a long line; twice that where no cluster holds a group
constexpr int kRunsAPiece = 16;          // of 32 lanes: units of whole lines
constexpr int kEach = 8;                 // vectors that a lane has of a unit, at most; the same
constexpr int kHeldThreads = 512;
constexpr int kPassingThreads = 256;
constexpr int64_t kSpanBytes = 16384;    // held: of x and dy that a block has at least, if there is so much
constexpr int64_t kHeldBytes = 114688;   // held: that it has by choice, so that two blocks fit in a multiprocessor
constexpr int kPassingBlocks = 2;        // of a multiprocessor
// Passing: pieces of other sets between a set's sums and its gradients, for each block that runs: so that few wait; but no
// more, so that x and dy still lie in the L2.
constexpr int kPiecesBetween = 1, kSlabPiecesBetween = 2;
constexpr int kBunch = 16;               // channels last: pieces whose sums are united first

inline int64_t next_power_of_two(int64_t n) {
  int64_t p = 1;
  while (p < n) p *= 2;
  return p;
}

// Vectors of x and dy that a lane has at once.
template <int Vec, bool SameSize>
constexpr int kVectorsAtOnce = Vec == 1 ? 8 : SameSize || Vec == 4 ? 4 : 2;

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
  const int64_t vectors = s.spatial / p.vec, lanes = next_power_of_two(vectors);
  p.lanes = static_cast<int>(lanes < 32 ? lanes : 32);
  // Passing goes from piece to piece: fewer and larger ones, of which the vectors are on their way ahead for longer.
  const int larger = lines * s.spatial * (s.itemsize + s.grad_itemsize) > kMaxCluster * kHeldBytes ? 2 : 1;
  const int64_t each = ceil_div(vectors, p.lanes);
  p.units = static_cast<int>(ceil_div(each, larger * kEach));
  p.each = static_cast<int>(ceil_div(each, p.units));
  p.units = static_cast<int>(ceil_div(each, p.each));  // each of which has some
  p.line_pieces = ceil_div(p.units, larger * kUnitsAPiece);
  p.piece_units = static_cast<int>(ceil_div(p.units, p.line_pieces));
  p.line_pieces = ceil_div(p.units, p.piece_units);
  const int64_t room = kRunsAPiece * 32 / p.lanes / p.piece_units;
  p.piece_lines = static_cast<int>(p.line_pieces > 1 || room < 1 ? 1 : ceil_div(lines, ceil_div(lines, room)));
  p.group_pieces = p.line_pieces > 1 ? lines * p.line_pieces : ceil_div(lines, p.piece_lines);
  p.groups = s.batch * s.num_groups;
  return p;
}

inline int passing_blocks(const Gpu& gpu) { return kPassingBlocks * (gpu.multiprocessors > 0 ? gpu.multiprocessors : 128); }

// Passing: pieces by which gradients follow sums, of `sets` of so many.
inline int64_t lag_of(int64_t sets, int64_t pieces, int between, const Gpu& gpu) {
  const int64_t lag = pieces + between * passing_blocks(gpu), all = sets * pieces;
  return lag < all ? lag : all;
}

// Whole groups for a block; false where a group is more than `bytes`.
inline bool hold_in_block(const GroupSizes& s, int64_t bytes, GroupBackwardPlan* p) {
  const int64_t lines = s.channels / s.num_groups, elements = lines * s.spatial;
  const int64_t wanted = kSpanBytes / (elements * (s.itemsize + s.grad_itemsize));
  int64_t span = wanted < 1 ? 1 : wanted < p->groups ? wanted : p->groups;
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
  p.held = (any && hold_in_block(s, by_choice, &p)) || (any && hold_in_cluster(s, gpu, by_choice, &p)) ||
           (regime == Regime::block && hold_in_block(s, gpu.shared, &p)) ||
           (regime == Regime::cluster && hold_in_cluster(s, gpu, gpu.shared, &p));
  if (p.held) {
    // Few threads where little memory lets many blocks run at once: each waits for its loads, barriers and stores.
    p.shared = static_cast<int>(held_bytes(p, s));
    const int64_t threads = next_power_of_two(ceil_div(int64_t{2} * kHeldThreads * p.shared, gpu.shared));
    p.threads = static_cast<int>(threads < 64 ? 64 : threads < kHeldThreads ? threads : kHeldThreads);
  } else {
    if (!any && regime != Regime::split) return false;
    p = cut_groups(s);
    p.lag = lag_of(p.groups, p.group_pieces, kPiecesBetween, gpu);
    p.threads = kPassingThreads;
    p.grid = passing_blocks(gpu);
  }
  *plan = p;
  return p.grid <= 0x7fffffff && 2 * p.groups * p.group_pieces <= 0x7fffffff;
}

// Pairs of sums for dweight and dbias.
inline int64_t group_line_sums(const GroupBackwardPlan& p, const GroupSizes& s) {
  return s.batch * s.channels * p.line_pieces;
}

// Bytes of scratch memory: those pairs; passing: pairs of sums of the pieces and groups, a ticket and two flags a group.
inline int64_t group_backward_workspace(const GroupBackwardPlan& p, const GroupSizes& s) {
  const int64_t passing = p.held ? 0 : p.groups * (p.group_pieces + 1) * 8 + (1 + 2 * p.groups) * 4;
  return group_line_sums(p, s) * 8 + passing;
}

// Channels last. A thread has `vec` channels and thread_rows rows of a piece.
struct GroupColumnsPlan {
  int vec, width, lanes;  // of a strip: channels (of the last maybe fewer), vectors
  int side, half_rows;    // rows that a block has side by side; of those of a warp the power of two below
  int thread_rows, piece_rows;
  int64_t strips, slabs, pieces, bunches;  // slabs in all; pieces and bunches of a slab
  int held_bytes;  // held: of x and dy, of a block; else 0
  int64_t lag;     // passing: pieces by which the gradients follow the sums
  int shared;
  int blocks;  // passing: at most
  int sum_rows;  // of sums that a block keeps
};

constexpr int kRowsAThread = 32;
constexpr int64_t kStripBytes = 128, kStripHeld = 64;  // of a row of x, by choice
constexpr int64_t kSlabBytes = 81920;                  // held: up to so many of x and dy, wider strips
constexpr int kHeldColumnsBlocks = 2;                  // held: of a multiprocessor
constexpr int kHeldColumnsBytes = 114688;              // held: of a block's shared memory
constexpr int kRowsHeld = 16;                          // of a thread, at most
constexpr int kMaxPiecesHeld = 4;                      // of a slab: larger clusters wait for each other for longer

// Of strips about so wide. Returns false where a group is too wide for a block.
inline bool cut_strips(const GroupSizes& s, int64_t strip_bytes, GroupColumnsPlan* plan) {
  GroupColumnsPlan p{};
  const int full = 16 / s.itemsize;
  const int64_t group = s.channels / s.num_groups;
  p.vec = s.channels % full == 0 ? full : 1;
  int64_t unit = group;  // the fewest channels that are whole groups and whole vectors
  while (unit % p.vec != 0) unit += group;
  if (unit / p.vec > kPassingThreads) return false;
  const int64_t most = kPassingThreads * p.vec / unit * unit, wanted = ceil_div(strip_bytes / s.itemsize, unit) * unit;
  const int64_t width = wanted < most ? wanted : most;
  p.width = static_cast<int>(width < s.channels ? width : s.channels);
  p.lanes = p.width / p.vec;
  const int of_warp = 32 / p.lanes, warps = kPassingThreads / 32;
  p.side = of_warp > 0 ? warps * of_warp : kPassingThreads / p.lanes;
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

// Bytes of a block's shared memory besides x and dy (see ColumnsShared).
inline int64_t columns_rest(const GroupColumnsPlan& p, int64_t pieces) {
  return in_vectors(4 * 5 * ceil_div(p.width, 4) * 4 + 8 * (p.sum_rows + pieces) * p.width);
}

// Pieces such that a block holds one and a cluster a slab. Returns false where there are none.
inline bool hold_columns(const GroupSizes& s, GroupColumnsPlan* p) {
  const int64_t row = int64_t{kPassingThreads} * p->vec * (s.itemsize + s.grad_itemsize);  // one of each thread
  const int64_t rows = ceil_div(s.spatial, p->side), rest = columns_rest(*p, kMaxPiecesHeld);
  const int64_t fit = rest < kHeldColumnsBytes ? (kHeldColumnsBytes - rest) / row : 0;
  const int64_t most = fit < kRowsHeld ? fit : kRowsHeld;
  if (p->vec == 1 || most < 1 || ceil_div(rows, most) > kMaxPiecesHeld) return false;
  cut_pieces(s, static_cast<int>(ceil_div(rows, ceil_div(rows, most))), p);
  p->held_bytes = static_cast<int>(p->thread_rows * row);
  p->shared = static_cast<int>(columns_rest(*p, p->pieces)) + p->held_bytes;
  return true;
}

// A slab for a cluster. Returns false where none holds one.
inline bool hold_strips(const GroupSizes& s, GroupColumnsPlan* p) {
  const int64_t of_row = s.spatial * (s.itemsize + s.grad_itemsize), whole = s.channels * s.itemsize;
  int64_t strip = kStripHeld;
  while (2 * strip / s.itemsize * of_row <= kSlabBytes && strip < whole) strip *= 2;
  return cut_strips(s, strip, p) && hold_columns(s, p);
}

// `regime`: split asks for passing. Returns false where a group is too wide for a block.
inline bool make_group_columns_plan(const GroupSizes& s, const Gpu& gpu, Regime regime, GroupColumnsPlan* plan) {
  GroupColumnsPlan p;
  bool held = hold_strips(s, &p);
  if (!held) {
    if (!cut_strips(s, kStripBytes, &p)) return false;
    cut_pieces(s, kRowsAThread, &p);
  }
  held = held && regime != Regime::split && gpu.shared >= kHeldColumnsBytes && (p.pieces == 1 || gpu.clusters);
  if (!held) {
    p.held_bytes = 0;
    p.shared = static_cast<int>(columns_rest(p, 0));
    p.lag = lag_of(p.slabs, p.pieces, kSlabPiecesBetween, gpu);
    p.blocks = passing_blocks(gpu);
  }
  *plan = p;
  return 2 * p.slabs * p.pieces <= 0x7fffffff;
}

inline int64_t group_columns_workspace(const GroupColumnsPlan& p, const GroupSizes& s) {
  const int64_t pairs = s.batch * (s.num_groups + s.channels) + p.slabs * (p.pieces + p.bunches) * p.width;
  return pairs * 8 + (1 + p.slabs * (p.bunches + 2)) * 4;
}

}  // namespace normswap
