// The backward of group_norm of contiguous tensors: group_backward_plan.h says how groups are cut, the kernels are the ways:
//   group_held     held: a block, or a cluster, has x and dy of whole groups in shared memory
//   group_passing  passing: blocks take pieces, for the sums of a group and later for its gradients
#pragma once

#include "group_backward.cuh"

namespace normswap {
namespace {

struct LinesArgs {
  GroupBackward n;
  int vectors, lanes, units, piece_lines, piece_units;
  int line_pieces, group_pieces, group_lines;
  int groups, channels;
  int block_pieces, block_lines, cluster;
  int64_t block_elements;
  int lag;
  bool gradients;  // of x or the residual; else those of weight and bias alone
  float reciprocal;  // of the elements of a group
  float2* line_sums;   // (batch, channels, line_pieces); null: not wanted
  // passing
  float2* piece_sums;  // (groups, group_pieces)
  float2* sums;        // (groups)
  unsigned* ticket;
  unsigned* arrived;  // (groups)
  unsigned* ready;    // (groups)

  __device__ int piece_size() const { return piece_lines * piece_units; }  // in units
};

// Lines [line, line + lines) of a group, `units` units of each from `unit` on.
struct PieceOfLines {
  int line, lines, unit, units;
  __device__ static PieceOfLines of(const LinesArgs& a, int piece) {
    if (a.line_pieces == 1) {
      const int line = piece * a.piece_lines;
      return {line, min(a.piece_lines, a.group_lines - line), 0, a.units};
    }
    const int line = piece / a.line_pieces, unit = (piece - line * a.line_pieces) * a.piece_units;
    return {line, 1, unit, min(a.piece_units, a.units - unit)};
  }
  // Of its first element, in the group.
  template <int V, int Each>
  __device__ int64_t offset(const LinesArgs& a) const {
    return static_cast<int64_t>(line) * a.n.sizes.spatial + static_cast<int64_t>(unit) * (a.lanes * Each * V);
  }
};

// A run of lanes' share of a piece; lines that are not there have no vectors.
template <int V, int Each>
struct Unit {
  int line;           // of the group
  int first, vectors;  // of this lane, in the line: first, first + lanes, ... before vectors
  __device__ static Unit of(const LinesArgs& a, const PieceOfLines& piece, int index) {
    const int line = index / a.piece_units, unit = index - line * a.piece_units;
    const bool there = line < piece.lines && unit < piece.units;
    const int lane = static_cast<int>(threadIdx.x) & (a.lanes - 1);
    return {piece.line + min(line, piece.lines - 1), (piece.unit + unit) * a.lanes * Each + lane, there ? a.vectors : 0};
  }
};

// Sums of g and of g (x - mean) of this lane's vectors of a unit, of which x(k) and dy(k) are the k-th; the first lies at
// `at` in the tensor.
template <class D, int V, int Each, class X, class Dy>
__device__ inline float2 unit_sums(const LinesArgs& a, const Unit<V, Each>& unit, const LineValues& line, int64_t at, X x,
                                   Dy dy) {
  float sum = 0.f, product = 0.f, gain[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) gain[j] = line.gain, bias[j] = line.bias;
#pragma unroll
  for (int k = 0; k < Each; ++k) {
    if (unit.first + k * a.lanes >= unit.vectors) break;
    float d[V], g[V];
    x(k).floats(d);
    dy(k).floats(g);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fsub_rn(d[j], line.mean);
    through_activation<D>(a.n, at + static_cast<int64_t>(k) * a.lanes * V, d, gain, bias, g);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sum = __fadd_rn(sum, g[j]);
      product = fmaf(g[j], d[j], product);
    }
  }
  return {sum, product};
}

// The gradients of them.
template <class T, class D, bool Last, int V, int Each, class X, class Dy>
__device__ inline void store_gradients(const LinesArgs& a, const Unit<V, Each>& unit, const LineValues& line,
                                       const GroupValues& group, int64_t at, X x, Dy dy) {
  float gain[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) gain[j] = line.gain, bias[j] = line.bias;
#pragma unroll
  for (int k = 0; k < Each; ++k) {
    if (unit.first + k * a.lanes >= unit.vectors) break;
    const int64_t to = at + static_cast<int64_t>(k) * a.lanes * V;
    float d[V], g[V];
    x(k).floats(d);
    dy(k).floats(g);
#pragma unroll
    for (int j = 0; j < V; ++j) d[j] = __fsub_rn(d[j], line.mean);
    through_activation<D>(a.n, to, d, gain, bias, g);
    if (a.n.dresidual != nullptr) Raw<D, V>::template store<Last>(static_cast<D*>(a.n.dresidual) + to, g);
    if (a.n.dx == nullptr) continue;
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = group.gradient(g[j], d[j], line.gain);
    Raw<T, V>::template store<Last>(static_cast<T*>(a.n.dx) + to, g);
  }
}

// The sums of a line in a piece, from its units'.
__device__ inline float2 line_sums_of(const float2* units, int count) {
  float2 sums = units[0];
  for (int i = 1; i < count; ++i) sums = plus(sums, units[i]);
  return sums;
}

// The sums of a piece (of g gain and of g gain (x - mean)), by a warp, from its units'; those of its lines are stored.
// values(line of the group).
template <class Values>
__device__ inline float2 unite_units(const LinesArgs& a, int64_t group, int number, const PieceOfLines& piece,
                                     const float2* units, Values values) {
  const int part = a.line_pieces == 1 ? 0 : number % a.line_pieces;
  return warp_sums(piece.lines, [&](int i) {
    const LineValues line = values(piece.line + i);
    const float2 sums = line_sums_of(units + i * a.piece_units, piece.units);
    if (a.line_sums != nullptr) {
      const int64_t to = (group * a.group_lines + piece.line + i) * a.line_pieces + part;
      a.line_sums[to] = {sums.x, __fmul_rn(sums.y, line.rstd)};
    }
    return float2{__fmul_rn(sums.x, line.gain), __fmul_rn(sums.y, line.gain)};
  });
}

// --- held ----------------------------------------------------------------------------------------------------------

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

template <class T, class D, int V>
__global__ void __launch_bounds__(kHeldThreads, 2) group_held(const LinesArgs args) {
  constexpr int Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  extern __shared__ __align__(16) char memory[];
  const HeldShared<T, D> shared(args, memory);
  const int cluster = args.cluster, rank = cluster > 1 ? static_cast<int>(blockIdx.x) % cluster : 0;
  const int span = cluster > 1 ? 1 : args.block_pieces / args.group_pieces;  // groups
  const int64_t first_group = static_cast<int64_t>(blockIdx.x / cluster) * span;
  const int groups = static_cast<int>(min(static_cast<int64_t>(span), args.groups - first_group));
  const int first_piece = rank * args.block_pieces;
  const int pieces = min(args.block_pieces, groups * args.group_pieces - first_piece);
  const int64_t group_elements = static_cast<int64_t>(args.group_lines) * args.n.sizes.spatial;
  // The block's elements, and lines, from these on; of the groups' from the first group's.
  const PieceOfLines first = PieceOfLines::of(args, first_piece);
  const int64_t base = first_group * group_elements, skipped = first.template offset<V, Each>(args);
  const int64_t end = first_piece + pieces < groups * args.group_pieces
                          ? PieceOfLines::of(args, first_piece + pieces).template offset<V, Each>(args)
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
    const int group = (first.line + i) / args.group_lines;
    const int64_t line = first_group * args.group_lines + first.line + i;
    shared.lines[i] = line_values(args.n, first_group + group, line % args.channels);
  }
  wait_for_copies();
  __syncthreads();
  const int runs = static_cast<int>(blockDim.x) / args.lanes, run = static_cast<int>(threadIdx.x) / args.lanes;
  const int size = args.piece_size(), units = pieces * size;
  // with(unit, its number, the line's values, its group of the block's, x(k), dy(k), where the first lies): the warp calls.
  const auto for_each_unit = [&](auto with) {
    for (int some = 0; some < units; some += runs) {
      const int number = min(some + run, units - 1), piece = number / size;
      const int group = (first_piece + piece) / args.group_pieces;
      const PieceOfLines of = PieceOfLines::of(args, first_piece + piece - group * args.group_pieces);
      Unit<V, Each> unit = Unit<V, Each>::of(args, of, number - piece * size);
      if (some + run >= units) unit.vectors = 0;
      const int line = group * args.group_lines + unit.line;
      const int64_t at = static_cast<int64_t>(line) * args.n.sizes.spatial + static_cast<int64_t>(unit.first) * V;
      const T* xs = shared.x + (at - skipped);
      const D* dys = shared.dy + (at - skipped);
      const int step = args.lanes * V;
      with(unit, some + run, shared.lines[line - first.line], group, [=](int k) { return Raw<T, V>::load(xs + k * step); },
           [=](int k) { return Raw<D, V>::load(dys + k * step); }, base + at);
    }
  };
  for_each_unit([&](const auto& unit, int number, const LineValues& line, int, auto xs, auto dys, int64_t at) {
    const float2 sums = run_sums(unit_sums<D>(args, unit, line, at, xs, dys), args.lanes);
    if (number < units && threadIdx.x % args.lanes == 0) shared.units[number] = sums;
  });
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32, warp = static_cast<int>(threadIdx.x) / 32;
  if constexpr (kClusters) {
    if (cluster > 1) cluster_wait();  // every block of the cluster runs
  }
  for (int piece = warp; piece < pieces; piece += warps) {
    const int group = (first_piece + piece) / args.group_pieces, number = first_piece + piece - group * args.group_pieces;
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
      const float rstd = shared.lines[cluster > 1 ? 0 : group * args.group_lines].rstd;
      shared.groups[group] = GroupValues::of(sums, rstd, args.reciprocal);
    }
  }
  __syncthreads();
  for_each_unit([&](const auto& unit, int, const LineValues& line, int group, auto xs, auto dys, int64_t at) {
    store_gradients<T, D, false>(args, unit, line, shared.groups[group], at, xs, dys);
  });
}

// --- passing -------------------------------------------------------------------------------------------------------

template <class T, class D, int V>
__global__ void __launch_bounds__(kPassingThreads, 3) group_passing(const LinesArgs args) {
  constexpr int Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  __shared__ float2 of_units[kUnitsAPiece * 32];
  const int ticket = take_ticket(args.ticket);
  const Turn turn = args.gradients ? Turn::of(ticket, args.groups, args.group_pieces, args.lag)
                                   : Turn{false, ticket / args.group_pieces, ticket % args.group_pieces};
  const PieceOfLines piece = PieceOfLines::of(args, turn.piece);
  const int first_line = static_cast<int>((static_cast<int64_t>(turn.set) * args.group_lines) % args.channels);
  const int64_t base = static_cast<int64_t>(turn.set) * args.group_lines * args.n.sizes.spatial;
  const T* x = static_cast<const T*>(args.n.x);
  const D* dy = static_cast<const D*>(args.n.dy);
  const int runs = kPassingThreads / args.lanes, run = static_cast<int>(threadIdx.x) / args.lanes, size = args.piece_size();
  const auto values = [&](int line) { return line_values(args.n, turn.set, first_line + line); };
  const float rstd = args.n.rstd[turn.set];
  GroupValues group{};
  for (int some = 0; some < size; some += runs) {
    Unit<V, Each> unit = Unit<V, Each>::of(args, piece, min(some + run, size - 1));
    if (some + run >= size) unit.vectors = 0;
    const int64_t at = base + static_cast<int64_t>(unit.line) * args.n.sizes.spatial + static_cast<int64_t>(unit.first) * V;
    Raw<T, V> xs[Each];
    Raw<D, V> dys[Each];
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      if (unit.first + k * args.lanes >= unit.vectors) break;
      const int64_t from = at + k * args.lanes * V;
      xs[k] = turn.gradients ? Raw<T, V>::template load<true>(x + from) : Raw<T, V>::load(x + from);
      dys[k] = turn.gradients ? Raw<D, V>::template load<true>(dy + from) : Raw<D, V>::load(dy + from);
    }
    const auto x_of = [&](int k) { return xs[k]; };
    const auto dy_of = [&](int k) { return dys[k]; };
    const LineValues line = values(unit.line);
    if (!turn.gradients) {
      const float2 sums = run_sums(unit_sums<D>(args, unit, line, at, x_of, dy_of), args.lanes);
      if (some + run < size && threadIdx.x % args.lanes == 0) of_units[some + run] = sums;
      continue;
    }
    if (some == 0) {
      wait_until_ready(args.ready + turn.set);
      group = GroupValues::of(__ldcg(args.sums + turn.set), rstd, args.reciprocal);
    }
    store_gradients<T, D, true>(args, unit, line, group, at, x_of, dy_of);
  }
  if (turn.gradients) return;
  __syncthreads();
  float2* const pieces = args.piece_sums + static_cast<int64_t>(turn.set) * args.group_pieces;
  if (threadIdx.x < 32) {
    const float2 sums = unite_units(args, turn.set, turn.piece, piece, of_units, values);
    if (threadIdx.x == 0) pieces[turn.piece] = sums;
  }
  if (!args.gradients || !arrives_last(args.arrived + turn.set, args.group_pieces) || threadIdx.x >= 32) return;
  const float2 sums = warp_sums(args.group_pieces, [&](int i) { return __ldcg(pieces + i); });
  if (threadIdx.x == 0) {
    args.sums[turn.set] = sums;
    set_ready(args.ready + turn.set);
  }
}

// --- launch --------------------------------------------------------------------------------------------------------

inline LinesArgs lines_args(const GroupBackward& n, const GroupBackwardPlan& p) {
  const GroupSizes& s = n.sizes;
  LinesArgs a{};
  a.n = n;
  a.vectors = static_cast<int>(s.spatial / p.vec);
  a.lanes = p.lanes;
  a.units = p.units;
  a.piece_lines = p.piece_lines;
  a.piece_units = p.piece_units;
  a.line_pieces = static_cast<int>(p.line_pieces);
  a.group_pieces = static_cast<int>(p.group_pieces);
  a.group_lines = static_cast<int>(s.channels / s.num_groups);
  a.groups = static_cast<int>(p.groups);
  a.channels = static_cast<int>(s.channels);
  a.block_pieces = p.block_pieces;
  a.block_lines = p.block_lines;
  a.cluster = p.cluster;
  a.block_elements = p.block_elements;
  a.lag = static_cast<int>(p.lag);
  a.gradients = n.dx != nullptr || n.dresidual != nullptr;
  a.reciprocal = 1.f / static_cast<float>(s.spatial * a.group_lines);
  char* room = static_cast<char*>(n.workspace);
  if (n.dweight.data != nullptr || n.dbias.data != nullptr) {
    a.line_sums = reinterpret_cast<float2*>(room);
    room += group_line_sums(p, s) * sizeof(float2);
  }
  a.piece_sums = reinterpret_cast<float2*>(room);
  a.sums = a.piece_sums + p.groups * p.group_pieces;
  a.ticket = reinterpret_cast<unsigned*>(a.sums + p.groups);
  a.arrived = a.ticket + 1;
  a.ready = a.arrived + p.groups;
  return a;
}

template <class T, class D, int V>
cudaError_t launch_lines(const LinesArgs& a, const GroupBackwardPlan& p, bool overlap, cudaStream_t stream) {
  if (p.held) {
    const LaunchShape shape{grid_of(p.grid), p.threads, p.shared, p.cluster, overlap};
    return launch_block<group_held<T, D, V>>(a, shape, stream);
  }
  const cudaError_t error = cudaMemsetAsync(a.ticket, 0, (1 + 2 * p.groups) * sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{grid_of(a.gradients ? p.grid : p.grid / 2), p.threads, 0, 1, false};
  return launch_block<group_passing<T, D, V>>(a, shape, stream);
}

template <class T, class D>
cudaError_t group_backward_of(const GroupBackward& n, const GroupBackwardPlan& p, bool overlap, cudaStream_t stream) {
  const LinesArgs args = lines_args(n, p);
  constexpr int full = 16 / static_cast<int>(sizeof(T));
  cudaError_t error = p.vec == full ? launch_lines<T, D, full>(args, p, overlap, stream)
                      : p.vec == 1  ? launch_lines<T, D, 1>(args, p, overlap, stream)
                                    : launch_lines<T, D, 4>(args, p, overlap, stream);
  if (error == cudaSuccess) error = launch_sum_lines(n, args.line_sums, p.line_pieces, overlap, stream);
  return error == cudaSuccess ? cudaGetLastError() : error;
}

}  // namespace
}  // namespace normswap
