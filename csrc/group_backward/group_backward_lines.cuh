// The backward of group_norm of contiguous tensors: group_backward_plan.h says how groups are cut, the kernels are the ways:
//   group_held     held: a block, or a cluster, has x and dy of whole groups in shared memory
//   group_passing  passing: blocks take pieces, for the sums of a group and later for its gradients
#pragma once

#include "device/slope.h"
#include "group_backward/group_backward_held.cuh"

namespace normswap {
namespace {

// Vectors of a unit in registers, as many as there is room for: those to come are on their way.
template <class T, class D, int V>
struct LoadedVectors {
  static constexpr int Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  const T* x;
  const D* dy;
  Raw<T, V> xs[Each];
  Raw<D, V> dys[Each];

  // Starts with the first ones. Last: see Raw.
  template <bool Last>
  __device__ void begin(const LinesArgs& a, const Unit& unit, int64_t at) {
    x = static_cast<const T*>(a.n.x) + at;
    dy = static_cast<const D*>(a.n.dy) + at;
#pragma unroll
    for (int k = 0; k < Each; ++k) {
      if (unit.first + k * a.lanes < unit.end) load<Last>(k, k * a.lanes * V);
    }
  }
  template <bool Last>
  __device__ void load(int k, int ahead) {
    xs[k] = Raw<T, V>::template load<Last>(x + ahead);
    dys[k] = Raw<D, V>::template load<Last>(dy + ahead);
  }
};

template <class T, class D, int V_, bool Last>
struct FromLoaded {
  static constexpr int V = V_, Each = LoadedVectors<T, D, V>::Each;
  static constexpr bool Keeps = false;
  LoadedVectors<T, D, V>& of;
  __device__ void take(int k, int step, bool more, float (&to_x)[V], float (&to_dy)[V]) {
    take_floats(of.xs[k], to_x);
    take_floats(of.dys[k], to_dy);
    if (more) of.template load<Last>(k, Each * step);
    of.x += step;
    of.dy += step;
  }
};

template <class T, class D, int V>
__global__ void __launch_bounds__(kPassingThreads, kPassingBlocks) group_passing(const LinesArgs args) {
  __shared__ float2 of_units[kRunsAPiece * 32];
  __shared__ int heard;
  const int runs = kPassingThreads / args.lanes, run = static_cast<int>(threadIdx.x) / args.lanes, size = args.piece_size();
  LoadedVectors<T, D, V> vectors;
  const auto turn_of = [&](int ticket) {
    return args.gradients ? Turn::of(ticket, args.groups, args.group_pieces, args.lag)
                          : Turn{false, ticket / args.group_pieces, ticket % args.group_pieces};
  };
  // This lane's unit of a turn, `some` units on, and where it lies.
  const auto unit_of = [&](const Turn& turn, int some) {
    return Unit::of(args, PieceOfLines::of(args, turn.piece), min(some + run, size - 1), some + run < size);
  };
  const auto place_of = [&](const Turn& turn, const Unit& unit) {
    const int64_t line = static_cast<int64_t>(turn.set) * args.group_lines + unit.line;
    return line * args.n.sizes.spatial + static_cast<int64_t>(unit.first) * V;
  };
  const auto begin_unit = [&](const Turn& turn, const Unit& unit) {
    if (turn.gradients) {
      vectors.template begin<true>(args, unit, place_of(turn, unit));
    } else {
      vectors.template begin<false>(args, unit, place_of(turn, unit));
    }
  };
  const auto begin = [&](int ticket) {
    if (ticket >= args.tickets) return;
    const Turn turn = turn_of(ticket);
    begin_unit(turn, unit_of(turn, 0));
  };
  Tickets tickets(args.ticket, &heard);
  int ticket = tickets.hear();
  begin(ticket);
  while (ticket < args.tickets) {
    __syncthreads();
    tickets.ask();
    const Turn turn = turn_of(ticket);
    const int first_line = static_cast<int>((static_cast<int64_t>(turn.set) * args.group_lines) % args.channels);
    const auto values = [&](int line) { return line_values(args.n, turn.set, first_line + line); };
    GroupValues group{};
    for (int some = 0; some < size; some += runs) {
      const Unit unit = unit_of(turn, some);
      if (some > 0) begin_unit(turn, unit);
      const int64_t at = place_of(turn, unit);
      const LineValues line = values(unit.line);
      if (turn.gradients) {
        if (some == 0) {
          wait_until_ready(args.ready + turn.set);
          group = GroupValues::of(__ldcg(args.sums + turn.set), line.mean, line.rstd, args.reciprocal);
        }
        FromLoaded<T, D, V, true> source{vectors};
        store_gradients<T, D, true>(args, unit, line, group, at, source);
      } else {
        FromLoaded<T, D, V, false> source{vectors};
        const float2 sums = run_sums(unit_sums<D>(args, unit, line, at, source), args.lanes);
        if (some + run < size && threadIdx.x % args.lanes == 0) of_units[some + run] = sums;
      }
    }
    ticket = tickets.hear();
    begin(ticket);
    if (turn.gradients) continue;
    float2* const pieces = args.piece_sums + static_cast<int64_t>(turn.set) * args.group_pieces;
    if (threadIdx.x < 32) {
      const PieceOfLines piece = PieceOfLines::of(args, turn.piece);
      const float2 sums = unite_units(args, turn.set, turn.piece, piece, of_units, values);
      if (threadIdx.x == 0) pieces[turn.piece] = sums;
    }
    if (!args.gradients || !arrives_last(args.arrived + turn.set, args.group_pieces)) continue;
    if (threadIdx.x < 32) {
      const float2 sums = warp_sums(args.group_pieces, [&](int i) { return __ldcg(pieces + i); });
      if (threadIdx.x == 0) {
        args.sums[turn.set] = sums;
        set_ready(args.ready + turn.set);
      }
    }
  }
}

// --- launch --------------------------------------------------------------------------------------------------------

inline LinesArgs lines_args(const GroupBackward& n, const GroupBackwardPlan& p) {
  const GroupSizes& s = n.sizes;
  LinesArgs a{};
  a.n = n;
  a.vectors = static_cast<int>(s.spatial / p.vec);
  a.lanes = p.lanes;
  a.each = p.each;
  a.units = p.units;
  a.piece_lines = p.piece_lines;
  a.piece_units = p.piece_units;
  a.line_pieces = static_cast<int>(p.line_pieces);
  a.group_pieces = static_cast<int>(p.group_pieces);
  a.group_lines = static_cast<int>(s.channels / s.num_groups);
  a.groups = static_cast<int>(p.groups);
  a.channels = static_cast<int>(s.channels);
  a.by_num_groups = Divider::by(s.num_groups);
  a.by_group_pieces = Divider::by(a.group_pieces);
  a.by_group_lines = Divider::by(a.group_lines);
  a.block_pieces = p.block_pieces;
  a.block_lines = p.block_lines;
  a.cluster = p.cluster;
  a.block_elements = p.block_elements;
  a.lag = static_cast<int>(p.lag);
  a.gradients = n.dx != nullptr || n.dresidual != nullptr;
  a.tickets = static_cast<int>(p.groups * p.group_pieces * (a.gradients ? 2 : 1));
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
    const Activation behind = a.n.activation.code;
    const bool fits = passes_or_stops(behind) || (sizeof(D) == 4 && behind != Activation::none);
    if (fits && a.gradients) return launch_block<group_held<T, D, V, true>>(a, shape, stream);
    return launch_block<group_held<T, D, V, false>>(a, shape, stream);
  }
  const cudaError_t error = cudaMemsetAsync(a.ticket, 0, (1 + 2 * p.groups) * sizeof(unsigned), stream);
  if (error != cudaSuccess) return error;
  const LaunchShape shape{grid_of(a.tickets < p.grid ? a.tickets : p.grid), p.threads, 0, 1, false};
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
