// The backward of group_norm of contiguous tensors: group_backward_plan.h says how groups are cut, the kernels are the ways:
//   group_held     held: a block, or a cluster, has x and dy of whole groups in shared memory
//   group_passing  passing: blocks take pieces, for the sums of a group and later for its gradients
#pragma once

#include "group_backward.cuh"

namespace normswap {
namespace {

struct LinesArgs {
  GroupBackward n;
  int vectors, lanes, each, units, piece_lines, piece_units;
  int line_pieces, group_pieces, group_lines;
  int groups, channels;
  int block_pieces, block_lines, cluster;
  int64_t block_elements;
  int lag, tickets;
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
  template <int V>
  __device__ int64_t offset(const LinesArgs& a) const {
    return static_cast<int64_t>(line) * a.n.sizes.spatial + static_cast<int64_t>(unit) * (a.lanes * a.each * V);
  }
};

// A run of lanes' share of a piece; lines that are not there have no vectors.
struct Unit {
  int line;        // of the group
  int first, end;  // this lane's vectors of the line: first, first + lanes, ... before end
  __device__ static Unit of(const LinesArgs& a, const PieceOfLines& piece, int index, bool wanted) {
    const int line = index / a.piece_units, unit = index - line * a.piece_units;
    const bool there = wanted && line < piece.lines && unit < piece.units;
    const int lane = static_cast<int>(threadIdx.x) & (a.lanes - 1), begin = (piece.unit + unit) * a.lanes * a.each;
    return {piece.line + min(line, piece.lines - 1), begin + lane, there ? min(begin + a.lanes * a.each, a.vectors) : 0};
  }
  // with(x, dy, where it lies) for every vector, of which `source` takes Each at a time; the first lies at `at`.
  template <class Source, class With>
  __device__ void for_each(const LinesArgs& a, int64_t at, Source& source, With with) const {
    constexpr int V = Source::V, Each = Source::Each;
    const int step = a.lanes * V;
#pragma unroll 1
    for (int v = first; v < end; v += Each * a.lanes) {
#pragma unroll
      for (int k = 0; k < Each; ++k) {
        if (v + k * a.lanes >= end) break;
        float x[V], g[V];
        source.take(k, step, v + (k + Each) * a.lanes < end, x, g);
        with(x, g, at);
        at += step;
      }
    }
  }
};

// Vectors of a unit that lie in shared memory.
template <class T, class D, int V_>
struct StagedVectors {
  static constexpr int V = V_, Each = kVectorsAtOnce<V, sizeof(T) == sizeof(D)>;
  const T* x;
  const D* dy;
  __device__ void take(int, int step, bool, float (&to_x)[V], float (&to_dy)[V]) {
    Raw<T, V>::load(x).floats(to_x);
    Raw<D, V>::load(dy).floats(to_dy);
    x += step;
    dy += step;
  }
};

// The same that lie elsewhere: those to come are on their way.
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
  LoadedVectors<T, D, V>& of;
  __device__ void take(int k, int step, bool more, float (&to_x)[V], float (&to_dy)[V]) {
    of.xs[k].floats(to_x);
    of.dys[k].floats(to_dy);
    if (more) of.template load<Last>(k, Each * step);
    of.x += step;
    of.dy += step;
  }
};

template <class D, int V>
__device__ inline void through_activation(const LinesArgs& a, const LineValues& line, int64_t at, const float (&x)[V],
                                          float (&g)[V]) {
  if (a.n.activation.code == Activation::none) return;
  float d[V], gain[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] = __fsub_rn(x[j], line.mean), gain[j] = line.gain, bias[j] = line.bias;
  through_activation<D>(a.n, at, d, gain, bias, g);
}

// Sums of g and of g (x - mean) of this lane's vectors of a unit.
template <class D, class Source>
__device__ inline float2 unit_sums(const LinesArgs& a, const Unit& unit, const LineValues& line, int64_t at,
                                   Source& source) {
  constexpr int V = Source::V;
  float sum = 0.f, product = 0.f;
  unit.for_each(a, at, source, [&](const float (&x)[V], float (&g)[V], int64_t from) {
    through_activation<D>(a, line, from, x, g);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      sum = __fadd_rn(sum, g[j]);
      product = fmaf(g[j], __fsub_rn(x[j], line.mean), product);
    }
  });
  return {sum, product};
}

// The gradients of them.
template <class T, class D, bool Last, class Source>
__device__ inline void store_gradients(const LinesArgs& a, const Unit& unit, const LineValues& line,
                                       const GroupValues& group, int64_t at, Source& source) {
  constexpr int V = Source::V;
  unit.for_each(a, at, source, [&](const float (&x)[V], float (&g)[V], int64_t to) {
    through_activation<D>(a, line, to, x, g);
    if (a.n.dresidual != nullptr) Raw<D, V>::template store<Last>(static_cast<D*>(a.n.dresidual) + to, g);
    if (a.n.dx == nullptr) return;
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = group.gradient(g[j], x[j], line.gain);
    Raw<T, V>::template store<Last>(static_cast<T*>(a.n.dx) + to, g);
  });
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
    const int group = (first.line + i) / args.group_lines;
    const int64_t line = first_group * args.group_lines + first.line + i;
    shared.lines[i] = line_values(args.n, first_group + group, line % args.channels);
  }
  wait_for_copies();
  __syncthreads();
  const int runs = static_cast<int>(blockDim.x) / args.lanes, run = static_cast<int>(threadIdx.x) / args.lanes;
  const int size = args.piece_size(), units = pieces * size;
  // with(unit, its number, the line's values, its group of the block's, its vectors, where the first lies): the warp calls.
  const auto for_each_unit = [&](auto with) {
    for (int some = 0; some < units; some += runs) {
      const int number = min(some + run, units - 1), piece = number / size;
      const int group = (first_piece + piece) / args.group_pieces;
      const PieceOfLines of = PieceOfLines::of(args, first_piece + piece - group * args.group_pieces);
      const Unit unit = Unit::of(args, of, number - piece * size, some + run < units);
      const int line = group * args.group_lines + unit.line;
      const int64_t at = static_cast<int64_t>(line) * args.n.sizes.spatial + static_cast<int64_t>(unit.first) * V;
      StagedVectors<T, D, V> vectors{shared.x + (at - skipped), shared.dy + (at - skipped)};
      with(unit, some + run, shared.lines[line - first.line], group, vectors, base + at);
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
      const LineValues& line = shared.lines[cluster > 1 ? 0 : group * args.group_lines];
      shared.groups[group] = GroupValues::of(sums, line.mean, line.rstd, args.reciprocal);
    }
  }
  __syncthreads();
  for_each_unit([&](const Unit& unit, int, const LineValues& line, int group, auto& vectors, int64_t at) {
    store_gradients<T, D, false>(args, unit, line, shared.groups[group], at, vectors);
  });
}

// --- passing -------------------------------------------------------------------------------------------------------

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
    return launch_block<group_held<T, D, V>>(a, shape, stream);
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
