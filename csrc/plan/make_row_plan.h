// Makes the plans of row_plan.h: pure host code, called by the launchers and, through normswap_row_plan, by tests.
#pragma once

#include "plan/row_plan.h"

namespace normswap {

// What a plan needs to know of the rows.
struct Rows {
  int64_t rows, cols;
  int itemsize;
  int weights;  // that an element may have of its own: 0, 1 or 2
  bool ragged;  // they begin or end elsewhere than at multiples of 16 bytes
  // norm_with_options: rows that no registers hold are split, and none has a multiprocessor alone.
  bool options;
  bool adds;  // with options: only a residual, before a norm that else stands alone
};

// How a block, or a cluster of blocks, holds rows of so many chunks.
inline Held held_by(Regime regime, int64_t chunks, const Rows& of) {
  if (regime != Regime::block) {
    if (of.ragged && of.options) return Held::no;  // rare, and not worth kernels more
    return chunks <= kMaxInCluster ? Held::in_cluster : chunks <= kMaxHeld ? Held::in_groups : Held::no;
  }
  const int most = of.itemsize == 2 ? kWarpsHeld<Held::in_block, 2> : kWarpsHeld<Held::in_block, 4>;
  return chunks <= most ? Held::in_block : Held::no;
}

// in_cluster: blocks for so many chunks; each has equally many, if that takes no more than twice as many blocks.
inline int even_blocks(int64_t chunks) {
  const int64_t few = ceil_div(chunks, kWarpsHeld<Held::in_cluster, 4>), least = few == 1 ? 2 : few;
  for (int64_t blocks = least; blocks <= kMaxCluster && blocks < 2 * least; ++blocks) {
    if (chunks % blocks == 0) return static_cast<int>(blocks);
  }
  return static_cast<int>(least);
}

// See keeps_weights: rows of a cluster, where there are enough; clusters that follow each other on a multiprocessor, since not
// all may fit in at once.
constexpr int kFewestTurns = 4;
constexpr int kMostTurns = 8;
constexpr int kWavesInTurns = 4;

inline void take_turns(const Rows& of, const Gpu& gpu, RowPlan* p) {
  const int64_t at_once = gpu.multiprocessors * int64_t{kBlocksHeld<Held::in_groups, 2>} / p->blocks_a_row;
  const int64_t turns = of.rows / (kWavesInTurns * at_once + 1);
  if (turns < kFewestTurns) return;
  p->grid = ceil_div(of.rows, turns < kMostTurns ? turns : kMostTurns) * p->blocks_a_row;
  p->shared = p->block_chunks * kChunk * of.itemsize * of.weights;
}

// Whether so many blocks, which have a multiprocessor each, are most of the GPU.
inline bool is_busy(const Gpu& gpu, int64_t blocks) { return blocks * 4 >= gpu.multiprocessors * int64_t{3}; }

// Whether a warp of a team keeps no weights of rows that begin and end at vectors, of 16-bit elements.
inline bool is_lean(const Rows& of) { return of.weights == 0 && !of.ragged && of.itemsize == 2; }

// Blocks that work on row after row together, each on a group of chunks. Returns false where they cannot. Where more groups
// than blocks run at once, they have the first of them.
inline bool make_team(const Rows& of, const Gpu& gpu, RowPlan* p) {
  const int64_t groups = row_groups(*p);
  const bool lean = is_lean(of);
  const bool apart = lean && is_busy(gpu, gpu.multiprocessors / groups * groups);
  const int blocks = lean && !apart ? kTeamBlocks<true, 2> : kTeamBlocks<false, 4>;  // on a multiprocessor
  const int slice = kWarpsTeam * chunk_bytes(p->chunk_len, of.itemsize);
  const int slots = (gpu.shared - blocks * kStatisticsBytes) / (blocks * slice);
  const int64_t at_once = static_cast<int64_t>(gpu.multiprocessors) * blocks;
  const int64_t most = at_once < kToldAtOnce ? at_once : kToldAtOnce;
  if (!gpu.cooperative || at_once == 0 || slots < 2) return false;
  p->overlap = false;
  p->blocks_a_row = static_cast<int>(groups <= at_once ? groups : most);
  p->block_chunks = kWarpsTeam;
  p->warps = kWarpsTeam + (apart ? kWarpsApart : 0);
  p->slots = slots < kMaxSlots ? slots : kMaxSlots;
  p->shared = p->slots * slice;
  const int64_t teams = at_once / p->blocks_a_row;
  p->grid = (of.rows < teams ? of.rows : teams) * p->blocks_a_row;
  return groups > 1 && groups <= kMaxGroups;
}

// Lanes that share a chunk. Few take fewer steps to unite what they have: of rows of whole vectors, whose elements have
// weights, or options, eight have up to kVectorsShort vectors each; of others eight or sixteen have one.
inline int chunk_lanes(const Rows& of) {
  const int vec = 16 / of.itemsize;
  const bool several = of.cols % vec == 0 && (of.weights > 0 || of.options);
  if (several) return of.cols <= 8 * kVectorsShort * vec ? 8 : 32;
  return of.cols <= 8 * vec ? 8 : of.cols <= 16 * vec ? 16 : 32;
}

// Whether a warp can have a row: of a chunk or, with weights of its elements, of up to half a chunk more, where a second warp
// would have little to do.
inline bool fits_warp(const Rows& of) {
  const bool by_element = of.options ? of.adds : of.weights > 0;
  return of.cols <= (by_element && !of.ragged ? kChunk / 2 * 3 : kChunk);
}

// The plan for rows of at least one element; `regime` other than automatic asks for that one. Returns false when the rows
// cannot be done in the regime asked for.
inline bool make_row_plan(const Rows& of, const Gpu& gpu, Regime regime, RowPlan* plan) {
  const auto [rows, cols, itemsize, weights, ragged, options, adds] = of;
  RowPlan p{};
  p.overlap = gpu.overlap;
  p.vec = 16 / itemsize;
  p.lanes = chunk_lanes(of);
  const bool tiny = p.lanes < 32;
  p.chunk_len = static_cast<int>(cols < kChunk ? cols : kChunk);
  p.chunks = ceil_div(cols, p.chunk_len);

  const int bytes = chunk_bytes(p.chunk_len, itemsize);
  const int most = (gpu.shared - kStatisticsBytes) / bytes;  // chunks that fit in a block's shared memory
  const int by_choice = kSliceBytes / (kChunk * itemsize);
  const bool held = held_by(Regime::block, p.chunks, of) != Held::no;
  const bool held_in_cluster = held_by(Regime::cluster, p.chunks, of) != Held::no;
  const bool staged = !options;  // rows may lie in shared memory
  const bool fits_block = held || (staged && p.chunks <= most && p.chunks <= kMaxChunks);
  const bool fits_cluster =
      gpu.clusters && (held_in_cluster || (staged && p.chunks <= kMaxCluster * most && p.chunks <= kMaxChunks));
  RowPlan team = p;
  const bool has_team = make_team(of, gpu, &team), has_all = team.blocks_a_row == row_groups(p);
  const bool fits_team = staged && has_team && has_all;
  const bool fits_both = staged && has_team && !has_all && row_groups(p) <= 2 * team.blocks_a_row && itemsize == 4 && !ragged;
  const bool by_team = fits_team && is_busy(gpu, team.grid);
  // Clusters that stage rows in shared memory and all run at once: a lean team is faster.
  const bool few = rows * kMaxCluster <= int64_t{kBlocksAMultiprocessor} * gpu.multiprocessors;
  const bool by_cluster = held_in_cluster || (p.chunks <= by_choice * kMaxCluster && !(few && by_team && is_lean(of)));
  const bool many = rows > int64_t{kWarpsSmall<32>} * gpu.multiprocessors;  // a block of row_pair for each, and more
  Regime r = regime;
  if (r == Regime::automatic) {
    r = tiny                                                                      ? Regime::subwarp
        : fits_warp(of) && (p.chunks == 1 || many)                                ? Regime::warp
        : held                                                                    ? Regime::block
        : fits_cluster && by_cluster                                              ? Regime::cluster
        : fits_block && p.chunks <= by_choice                                     ? Regime::block
        : by_team                                                                 ? Regime::team
        : fits_both && rows >= kRowsBoth                                          ? Regime::both
                                                                                  : Regime::split;
  }
  const bool possible = tiny                   ? r == Regime::subwarp
                        : r == Regime::warp    ? fits_warp(of)
                        : r == Regime::block   ? fits_block
                        : r == Regime::cluster ? fits_cluster
                        : r == Regime::team    ? fits_team
                        : r == Regime::both    ? fits_both
                                               : r == Regime::split;
  if (!possible) return false;
  p.regime = r;
  p.blocks_a_row = p.block_chunks = 1;
  switch (r) {
    case Regime::subwarp:
    case Regime::warp:
      p.warps = p.lanes == 32 ? kWarpsSmall<32> : kWarpsSmall<8>;
      p.grid = ceil_div(rows, p.warps * (32 / p.lanes));
      p.block_chunks = static_cast<int>(p.chunks);
      break;
    case Regime::block:
    case Regime::cluster:
      p.held = held_by(r, p.chunks, of);
      if (p.held == Held::in_block && rows <= gpu.multiprocessors && !options) p.held = Held::alone;
      p.blocks_a_row = r == Regime::block          ? 1
                       : p.held == Held::in_groups ? static_cast<int>(ceil_div(p.chunks, kGroup))
                       : p.held == Held::no        ? kMaxCluster
                                                   : even_blocks(p.chunks);
      p.block_chunks = p.held == Held::in_groups ? kGroup : static_cast<int>(ceil_div(p.chunks, p.blocks_a_row));
      p.warps = p.held != Held::no || p.block_chunks < kWarpsBlock ? p.block_chunks : kWarpsBlock;
      p.shared = p.held != Held::no ? 0 : p.block_chunks * bytes;
      p.grid = rows * p.blocks_a_row;
      if (keeps_weights(p.held, itemsize, weights) && cols % (kGroup * kChunk) == 0 && !ragged && !options) take_turns(of, gpu, &p);
      break;
    case Regime::team:
      p = team;
      p.regime = r;
      break;
    case Regime::both:
      p = team;
      p.regime = r;
      p.overlap = gpu.overlap;
      p.grid = rows * (row_groups(p) - p.blocks_a_row);
      break;
    default:
      p.warps = kWarpsSplit;
      p.block_chunks = kGroup;
      p.blocks_a_row = static_cast<int>(row_groups(p));
      p.grid = rows * row_groups(p);
  }
  *plan = p;
  return p.grid <= 0x7fffffff;
}

}  // namespace normswap
