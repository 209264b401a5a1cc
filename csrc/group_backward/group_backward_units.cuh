// The units that contiguous groups are cut into (group_backward_plan.h), and the sums and gradients of one.
#pragma once

#include "group_backward/group_backward.cuh"

namespace normswap {
namespace {

struct LinesArgs {
  GroupBackward n;
  int vectors, lanes, each, units, piece_lines, piece_units;
  int line_pieces, group_pieces, group_lines;
  int groups, channels;
  int block_pieces, block_lines, cluster;
  int64_t block_elements;
  Divider by_num_groups, by_group_pieces, by_group_lines;
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
    const int line = a.piece_units == 1 ? index : index / a.piece_units, unit = index - line * a.piece_units;
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

template <class D, int V>
__device__ inline void through_activation(const LinesArgs& a, const LineValues& line, int64_t at, const float (&x)[V],
                                          float (&g)[V]) {
  if (a.n.activation.code == Activation::none) return;
  float d[V], gain[V], bias[V];
#pragma unroll
  for (int j = 0; j < V; ++j) d[j] = __fsub_rn(x[j], line.mean), gain[j] = line.gain, bias[j] = line.bias;
  through_activation<D>(a.n, ResidualAt<D, V>{a.n.residual, at}, d, gain, bias, g);
}

// Sums of g and of g (x - mean) of this lane's vectors of a unit.
template <class D, class Source>
__device__ inline float2 unit_sums(const LinesArgs& a, const Unit& unit, const LineValues& line, int64_t at,
                                   Source& source) {
  constexpr int V = Source::V;
  float sum = 0.f, product = 0.f;
  unit.for_each(a, at, source, [&](const float (&x)[V], float (&g)[V], int64_t from) {
    through_activation<D>(a, line, from, x, g);
    if constexpr (Source::Keeps) source.keep(g);
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
    if constexpr (!Source::Keeps) through_activation<D>(a, line, to, x, g);
    if (a.n.dresidual != nullptr) Raw<D, V>::of(g).template store<Last>(static_cast<D*>(a.n.dresidual) + to);
    if (a.n.dx == nullptr) return;
#pragma unroll
    for (int j = 0; j < V; ++j) g[j] = group.gradient(g[j], x[j], line.gain);
    Raw<T, V>::of(g).template store<Last>(static_cast<T*>(a.n.dx) + to);
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

}  // namespace
}  // namespace normswap
