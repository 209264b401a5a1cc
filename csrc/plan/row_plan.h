// How a row is cut and who works on it; make_row_plan.h decides.
//
// The reduction tree is a function of the row length, the element size and, of short rows, the kind alone (chunk_lanes). A row
// of N elements is cut into `chunks` pieces of `chunk_len` (the last may be shorter); a chunk belongs to `lanes` lanes of one
// warp, lane l taking the 16-byte vectors l, l + lanes, ... counted from the row's start, wherever in memory that is; chunk
// statistics merge in a binary tree by chunk index. The regime says only which threads do the work, so that the bits of a row
// depend on neither the other rows, nor its address, nor the GPU.
#pragma once

#include "plan/plan.h"

namespace normswap {

// Who shares a row that is held in registers, a chunk a warp: the warps of a block, where rows are so few that it has a
// multiprocessor alone, or not; of a cluster, its blocks so small that several on a multiprocessor take turns at waiting;
// of a cluster of large blocks, each of which unites its chunks.
enum class Held : int { no, alone, in_block, in_cluster, in_groups };

// Warps of such a block, and so chunks, at most.
template <Held How, int Itemsize>
constexpr int kWarpsHeld = How == Held::in_groups || (How != Held::in_cluster && Itemsize == 2) ? 16 : 8;

// And such blocks on a multiprocessor that there are to be registers for: 64 a lane, or 80 of a block or cluster of 32-bit
// elements.
template <Held How, int Itemsize>
constexpr int kBlocksHeld = How == Held::alone                        ? 1
                            : How != Held::in_groups && Itemsize == 4 ? 3
                                                                      : 32 / kWarpsHeld<How, Itemsize>;

struct RowPlan {
  Regime regime;
  int vec;           // elements of 16 bytes
  int lanes;         // lanes of a warp that share a chunk: 8, 16 or 32
  int chunk_len;     // kChunk unless the row is shorter
  int64_t chunks;
  int warps;         // warps of a block
  Held held;         // block, cluster: in registers; other rows are in shared memory
  int block_chunks;  // chunks a block holds
  int blocks_a_row;  // that share a row; all but split: and run at once
  int64_t grid;      // blocks; of which each cluster that keeps weights has several rows; subwarp, warp: if a lane works on one row at a time; both: that take partial statistics
  int slots;         // team, both: rows of which a block holds slices at once
  int shared;        // bytes of dynamic shared memory a block; of a row in registers: where its weights are kept
  bool overlap;      // see LaunchShape; not of team
};

// block, cluster: chunks of a row that a cluster of small blocks holds, of one that any can; of one in shared memory, warps
// of a block at most, and what it holds by choice, so that as many fit in a multiprocessor.
constexpr int kMaxInCluster = kMaxCluster * kWarpsHeld<Held::in_cluster, 4>;
constexpr int kMaxHeld = kMaxCluster * kWarpsHeld<Held::in_groups, 4>;
constexpr int kMaxChunks = 512;

// Whether a cluster may take row after row and keep the weights that an element has in shared memory: from the L2 they would
// be as much as the rows, or twice that. Of rows in small blocks more are under way at once, which is faster.
constexpr bool keeps_weights(Held how, int itemsize, int weights) {
  return how == Held::in_groups && itemsize == 2 && weights > 0;
}

constexpr int kWarpsBlock = 8;
constexpr int kSliceBytes = 65536;
constexpr int kBlocksAMultiprocessor = 3;

// team, and the team's part of both: a warp has a chunk; slices of rows that a block holds at once, at most; turns between
// the statistic of a row and the rest of what is to be done with it, at most, and of how many a block keeps what its warps
// tell each other; sets of messages: who tells of turn k + 2 + 2 lag knows the values of turn k + 1 + lag, whose tellers knew
// those of turn k; blocks of which a warp hears at once, and of which the team of both is one at most.
constexpr int kWarpsTeam = kGroup;
constexpr int kMaxSlots = 6;
constexpr int kMostLag = 2;
constexpr int kTurnsKept = kMostLag + 1;
constexpr int kToldSets = 2 + 2 * kMostLag;
constexpr int kToldAtOnce = 128;

// team: blocks that a multiprocessor has registers for. Lean: a warp keeps no weights and its rows begin and end at vectors.
// Of lean 16-bit rows one block may have two warps more, which exchange the statistics, so that no other waits for them.
template <bool Lean, int Itemsize>
constexpr int kTeamBlocks = Lean && Itemsize == 2 ? 2 : 1;
constexpr int kWarpsApart = 2;

// team: blocks that share a row; split: groups that registers hold. both: groups of a row at most, of which the team has
// half or more, and rows at least, by choice; 32-bit elements only, since with 16 bits it gains nothing.
constexpr int kMaxGroups = 512;
constexpr int kGroupsBoth = 2 * kToldAtOnce;
constexpr int kRowsBoth = 6;

// split, and the rest of both: a warp has a chunk when statistics are taken; later so many elements of so many rows, in
// blocks of so many warps.
constexpr int kWarpsSplit = kGroup;
constexpr int kPiece = 512;
constexpr int kRowsSplit = 2;
constexpr int kWarpsApply = 8;

// subwarp: vectors of a lane at most; see chunk_lanes.
constexpr int kVectorsShort = 4;

// subwarp, warp: warps of a block. A row a warp: few, so that no block waits for many; many rows a warp: more, since blocks
// start at a limited rate.
template <int Lanes>
constexpr int kWarpsSmall = Lanes == 32 ? 4 : 8;

// subwarp, and warp where a lane has one vector of a row: rows that it works on at once; half as many where they begin
// anywhere and more than eight lanes share one.
constexpr int kRowsSubwarp = 4;

// A chunk in shared memory: at most 15 bytes of what precedes it come along.
inline int chunk_bytes(int chunk_len, int itemsize) {
  return static_cast<int>(ceil_div(static_cast<int64_t>(chunk_len) * itemsize, 16)) * 16 + 16;
}

inline int64_t row_groups(const RowPlan& plan) { return ceil_div(plan.chunks, kGroup); }

// Groups of a row that a team holds: team: all; both: the first.
inline int held_groups(const RowPlan& plan) {
  return plan.regime == Regime::team || plan.regime == Regime::both ? plan.blocks_a_row : 0;
}

// Bytes of scratch memory. team, both: 16 bytes a block, row of a turn and set. split, both: a statistic (three floats) and
// a float a group, two floats a row.
inline int64_t row_workspace_bytes(const RowPlan& plan, int64_t rows) {
  if (plan.regime == Regime::team) return plan.grid * kToldSets * 16;
  if (plan.regime != Regime::split && plan.regime != Regime::both) return 0;
  const int64_t room = rows * (row_groups(plan) * 4 + 2) * static_cast<int64_t>(sizeof(float));
  return held_groups(plan) * kToldSets * 16 + room;
}

}  // namespace normswap
