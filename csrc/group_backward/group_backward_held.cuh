// The backward of group_norm of contiguous tensors where a block, or a cluster, has x and dy of whole groups in shared
// memory.
#pragma once

#include "group_backward/group_backward_units.cuh"

namespace normswap {
namespace {

// Vectors of a unit that lie in shared memory. Keeps_: see group_held.
template <class T, class D, int V_, bool Keeps_>
struct StagedVectors {
  static constexpr int V = V_, Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  static constexpr bool Keeps = Keeps_;
  const T* x;
  D* dy;
  D* last = nullptr;  // where the vector of dy was
  __device__ void take(int, int step, bool, float (&to_x)[V], float (&to_dy)[V]) {
    Raw<T, V>::load(x).floats(to_x);
    Raw<D, V>::load(dy).floats(to_dy);
    last = dy;
    x += step;
    dy += step;
  }
  // g in the place of dy, of the vector that was taken last.
  __device__ void keep(const float (&g)[V]) const {
    *reinterpret_cast<Raw<D, V>*>(last) = Raw<D, V>::of(g);
  }
};

// What a block has in shared memory.
template <class T, class D>
struct HeldShared {
  T* x;
  D* dy;
  LineValues* lines;
  float2* units;
  float2* pieces;  // of the cluster's group, or of the block's groups
  GroupValues* groups;
  __device__ HeldShared(const LinesArgs& a, char* shared) {
    const auto take = [&](int64_t bytes) {
      char* mine = shared;
      shared += (bytes + 15) / 16 * 16;
      return mine;
    };
    x = reinterpret_cast<T*>(take(a.block_elements * sizeof(T)));
    dy = reinterpret_cast<D*>(take(a.block_elements * sizeof(D)));
    lines = reinterpret_cast<LineValues*>(take(a.block_lines * sizeof(LineValues)));
    units = reinterpret_cast<float2*>(shared);
    pieces = units + a.block_pieces * a.piece_size();
    groups = reinterpret_cast<GroupValues*>(pieces + (a.cluster > 1 ? a.group_pieces : a.block_pieces));
  }
};

// Starts copying; by 16 bytes where they lie so.
template <class T>
__device__ inline void stage_elements(T* to, const T* from, int64_t count) {
  constexpr int per = 16 / static_cast<int>(sizeof(T));
  const bool whole = reinterpret_cast<uintptr_t>(from) % 16 == 0;
  const int vectors = whole ? static_cast<int>(count / per) : 0;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) copy_async(to + i * per, from + i * per);
  for (int64_t i = static_cast<int64_t>(vectors) * per + threadIdx.x; i < count; i += blockDim.x) to[i] = from[i];
}

// Keeps: what an activation makes of dy is of its dtype, and takes its place between the sums and the gradients.
template <class T, class D, int V, bool Keeps>
__global__ void __launch_bounds__(kHeldThreads, 2) group_held(const LinesArgs args) {
  extern __shared__ __align__(16) char memory[];
  const HeldShared<T, D> shared(args, memory);
  const int cluster = args.cluster, rank = cluster > 1 ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int span = cluster > 1 ? 1 : args.by_group_pieces.quotient(args.block_pieces);  // groups
  const int64_t first_group = static_cast<int64_t>(blockIdx.x / cluster) * span;
  const int groups = static_cast<int>(min(static_cast<int64_t>(span), args.groups - first_group));
  const int first_piece = rank * args.block_pieces;
  const int pieces = min(args.block_pieces, groups * args.group_pieces - first_piece);
  const int64_t group_elements = static_cast<int64_t>(args.group_lines) * args.n.sizes.spatial;
  // The block's elements, and lines, from these on; of the groups' from the first group's.
  const PieceOfLines first = PieceOfLines::of(args, first_piece);
  const int64_t base = first_group * group_elements, skipped = first.template offset<V>(args);
  const int64_t end = first_piece + pieces < groups * args.group_pieces
                          ? PieceOfLines::of(args, first_piece + pieces).template offset<V>(args)
                          : groups * group_elements;
  const T* x = static_cast<const T*>(args.n.x) + base;
  const D* dy = static_cast<const D*>(args.n.dy) + base;
  follow_predecessor();
  let_successor_start();
  if constexpr (kClusters) {
    if (cluster > 1) cluster_arrive();  // waited for below
  }
  stage_elements(shared.x, x + skipped, end - skipped);
  stage_elements(shared.dy, dy + skipped, end - skipped);
  const int lines = min(args.block_lines, groups * args.group_lines - first.line);
  for (int i = threadIdx.x; i < lines; i += blockDim.x) {
    const int of_block = args.by_group_lines.quotient(first.line + i), group = static_cast<int>(first_group) + of_block;
    const int groups_before = args.by_num_groups.quotient(group) * static_cast<int>(args.n.sizes.num_groups);
    const int channel = (group - groups_before - of_block) * args.group_lines + first.line + i;
    shared.lines[i] = line_values(args.n, group, channel);
  }
  wait_for_copies();
  __syncthreads();
  const int runs = static_cast<int>(blockDim.x) / args.lanes, run = static_cast<int>(threadIdx.x) / args.lanes;
  const int size = args.piece_size(), units = pieces * size;
  // with(unit, its number, the line's values, its group of the block's, its vectors, where the first lies): the warp calls.
  // Runs without a unit have the block's first, of no vectors. No quotient for each: many units are short.
  const int run_pieces = runs / size, run_units = runs - run_pieces * size;
  const auto for_each_unit = [&](auto with) {
    int piece = run / size, index = run - piece * size, group = 0, in_group = first_piece + piece;
    for (int some = 0; some < units; some += runs) {
      for (; in_group >= args.group_pieces; in_group -= args.group_pieces) ++group;
      const bool there = some + run < units;
      const PieceOfLines of = PieceOfLines::of(args, there ? in_group : first_piece);
      const Unit unit = Unit::of(args, of, there ? index : 0, there);
      const int line = (there ? group : 0) * args.group_lines + unit.line;
      const int64_t at = static_cast<int64_t>(line) * args.n.sizes.spatial + static_cast<int64_t>(unit.first) * V;
      StagedVectors<T, D, V, Keeps> vectors{shared.x + (at - skipped), shared.dy + (at - skipped)};
      with(unit, some + run, shared.lines[line - first.line], there ? group : 0, vectors, base + at);
      index += run_units;
      const int more = run_pieces + (index >= size ? 1 : 0);
      index -= index >= size ? size : 0;
      in_group += more;
    }
  };
  for_each_unit([&](const Unit& unit, int number, const LineValues& line, int, auto& vectors, int64_t at) {
    const float2 sums = run_sums(unit_sums<D>(args, unit, line, at, vectors), args.lanes);
    if (number < units && threadIdx.x % args.lanes == 0) shared.units[number] = sums;
  });
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  if constexpr (kClusters) {
    if (cluster > 1) cluster_wait();  // every block of the cluster runs
  }
  for (int piece = warp; piece < pieces; piece += warps) {
    const int group = args.by_group_pieces.quotient(first_piece + piece), number = first_piece + piece - group * args.group_pieces;
    const float2 sums = unite_units(args, first_group + group, number, PieceOfLines::of(args, number),
                                    shared.units + piece * size, [&](int line) {
                                      return shared.lines[group * args.group_lines + line - first.line];
                                    });
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (cluster == 1) {
      if (lane == 0) shared.pieces[piece] = sums;
    } else if (lane < cluster) {
      store_in_block(shared.pieces + first_piece + piece, lane, sums);
    }
  }
  if (!args.gradients && cluster == 1) return;
  if (cluster > 1) {
    if constexpr (kClusters) {
      cluster_arrive();
      cluster_wait();
    }
  } else {
    __syncthreads();
  }
  if (!args.gradients) return;
  for (int group = warp; group < groups; group += warps) {
    const float2* of = shared.pieces + group * args.group_pieces;
    const float2 sums = warp_sums(args.group_pieces, [&](int i) { return of[i]; });
    if (threadIdx.x % 32 == 0) {
      const LineValues& line = shared.lines[cluster > 1 ? 0 : group * args.group_lines];
      shared.groups[group] = GroupValues::of(sums, line.mean, line.rstd, args.reciprocal);
    }
  }
  __syncthreads();
  for_each_unit([&](const Unit& unit, int, const LineValues& line, int group, auto& vectors, int64_t at) {
    store_gradients<T, D, false>(args, unit, line, shared.groups[group], at, vectors);
  });
}

}  // namespace
}  // namespace normswap
