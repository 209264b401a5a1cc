// What distinguishes the row norms: a policy names a statistic (Moments or Sum), how chunks' are taken, what a row makes
// of it (RowValues) and how an element is normalised.
#pragma once

#include "activation.cuh"
#include "row_tile.cuh"

namespace normswap {
namespace {

struct RowValues {
  float mean, rstd;
};

// What the kernels take: RowNorm and how rows are cut.
struct RowArgs {
  RowNorm n;
  int64_t chunks, blocks_a_row;
  int chunk_len, chunk_bytes, block_chunks;
};

// sums[r] = sum of term(r, x) over the chunk in tiles[r]; every lane of the chunk holds them.
template <class Tile, int Rows, class Term>
__device__ inline void chunk_sums(Tile (&tiles)[Rows], float (&sums)[Rows], Term term) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    sums[r] = tiles[r].partial_sum([&](float x, float into) { return term(r, x, into); });
    tiles[r].forget();
  }
  lanes_sum<Tile::Lanes>(sums);
}

// y = (x - mean) rstd w + b, rstd = 1 / sqrt(var + eps), biased variance by two passes over the chunk on chip.
struct Centred {
  using Stat = Moments;
  static constexpr bool has_bias = true;
  static constexpr bool has_affine = true, always_fast = true, has_activation = false;
  __device__ static bool fast(RowValues) { return true; }
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], Stat (&out)[Rows]) {
    float mean[Rows], m2[Rows];
    chunk_sums(tiles, mean, [](int, float x, float into) { return __fadd_rn(into, x); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) mean[r] = __fdiv_rn(mean[r], static_cast<float>(tiles[r].len));
    chunk_sums(tiles, m2, [&](int r, float x, float into) {
      const float d = __fsub_rn(x, mean[r]);
      return fmaf(d, d, into);
    });
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      out[r] = tiles[r].len > 0 ? Stat{mean[r], m2[r], static_cast<float>(tiles[r].len)} : Stat{};
    }
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    return {s.mean, rsqrtf(__fadd_rn(__fdiv_rn(s.m2, static_cast<float>(n.cols)), static_cast<float>(n.eps)))};
  }
  __device__ static float saved_mean(const Stat&, RowValues values, const RowNorm&) { return values.mean; }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float w, float b) {
    return fmaf(__fmul_rn(__fsub_rn(x, row.mean), row.rstd), w, b);
  }
  __device__ static float factor(float w, const RowNorm&) { return w; }
};

struct LayerNormPolicy : Centred {};
struct GroupNormPolicy : Centred {
  static constexpr bool has_activation = true;
};

// y = x rstd (offset + w), rstd = 1 / sqrt(mean(x^2) + eps); with CastFirst x rstd is rounded to T before the product.
template <bool CastFirst>
struct RMSNormPolicy {
  using Stat = Sum;
  static constexpr bool has_bias = false;
  static constexpr bool has_affine = true, always_fast = true, has_activation = false;
  __device__ static bool fast(RowValues) { return true; }
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], Stat (&out)[Rows]) {
    float sums[Rows];
    chunk_sums(tiles, sums, [](int, float x, float into) { return fmaf(x, x, into); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) out[r] = {sums[r]};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    return {0.f, rsqrtf(__fadd_rn(__fdiv_rn(s.sum, static_cast<float>(n.cols)), static_cast<float>(n.eps)))};
  }
  __device__ static float saved_mean(const Stat&, RowValues, const RowNorm&) { return 0.f; }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float w, float) {
    const float scaled = __fmul_rn(x, row.rstd);
    return __fmul_rn(CastFirst ? to_float(from_float<T>(scaled)) : scaled, w);
  }
  __device__ static float factor(float w, const RowNorm& n) { return __fadd_rn(w, static_cast<float>(n.weight_offset)); }
};

// y = x / (max(mean|x|, minimum) + eps), the divisor rounded to x's dtype as the expression does.
struct L1NormPolicy {
  using Stat = Sum;
  static constexpr bool has_bias = false;
  static constexpr bool has_affine = false, always_fast = false, has_activation = false;
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], Stat (&out)[Rows]) {
    float sums[Rows];
    chunk_sums(tiles, sums, [](int, float x, float into) { return __fadd_rn(into, fabsf(x)); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) out[r] = {sums[r]};
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowNorm& n) {
    const float divisor = l1_divisor<T>(__fdiv_rn(s.sum, static_cast<float>(n.cols)), n.eps, n.minimum);
    return {divisor, Divisor::of(divisor).reciprocal};
  }
  __device__ static float saved_mean(const Stat& s, RowValues, const RowNorm& n) {
    return __fdiv_rn(s.sum, static_cast<float>(n.cols));
  }
  __device__ static bool fast(RowValues row) { return Divisor{row.mean, row.rstd}.fast(); }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float, float) {
    return Divisor{row.mean, row.rstd}.template divide<Fast>(x);
  }
};

// --- affine parameters -------------------------------------------------------------------------------------------

// V values from data[at] on, those from `limit` on being absent.
template <class W, int V, bool Ragged, bool Present>
__device__ inline Floats<V> affine_pack(const void* data, int64_t at, int64_t limit, float absent) {
  Floats<V> out;
  if ((!Present && data == nullptr) || (Ragged && at + V > limit)) {
#pragma unroll
    for (int j = 0; j < V; ++j) {
      out.v[j] = data != nullptr && at + j < limit ? to_float(static_cast<const W*>(data)[at + j]) : absent;
    }
    return out;
  }
  // Float weights of 16-bit rows come in pieces of at most 16 bytes.
  constexpr int piece = V * sizeof(W) > 16 ? static_cast<int>(16 / sizeof(W)) : V;
#pragma unroll
  for (int i = 0; i < V; i += piece) {
    const auto raw = Pack<W, piece>::load_cached(static_cast<const W*>(data) + at + i);
#pragma unroll
    for (int j = 0; j < piece; ++j) out.v[i + j] = to_float(raw.v[j]);
  }
  return out;
}

// One value an element of the row.
template <class Policy, class W, int V, bool Ragged, bool Present>
struct AffineByElement {
  static constexpr bool same_for_all_rows = true;
  const RowArgs& args;
  int64_t begin;
  __device__ AffineByElement(const RowArgs& a, int64_t, int64_t chunk_begin, int) : args(a), begin(chunk_begin) {}
  __device__ void operator()(int offset, Floats<V>& w, Floats<V>& b) const {
    w = affine_pack<W, V, Ragged, Present>(args.n.weight, begin + offset, args.n.cols, 1.f);
    if constexpr (Policy::has_bias) b = affine_pack<W, V, Ragged, Present>(args.n.bias, begin + offset, args.n.cols, 0.f);
#pragma unroll
    for (int j = 0; j < V; ++j) w.v[j] = Policy::factor(w.v[j], args.n);
  }
};

// a / b for b > 0; the division of 64 bits is slow.
__device__ inline int64_t divided(int64_t a, int64_t b) {
  if ((a | b) >> 32 == 0) return static_cast<unsigned>(a) / static_cast<unsigned>(b);
  return a / b;
}

// One value a channel: element e of row r belongs to channel (r % groups) * channels_per_group + e / spatial.
template <class W, int V>
struct AffineByChannel {
  static constexpr bool same_for_all_rows = false;
  const RowArgs& args;
  int64_t channel, last;  // of the chunk's first element, of the row
  unsigned remainder;     // of the first element within its channel
  unsigned spatial;
  enum { one, two, many } channels;  // in the chunk; two: no vector lies in both
  float w0, b0, w1, b1;

  __device__ AffineByChannel(const RowArgs& a, int64_t row, int64_t chunk_begin, int len) : args(a) {
    const int64_t within = divided(chunk_begin, a.n.spatial);
    const int64_t first = (row - divided(row, a.n.num_groups) * a.n.num_groups) * a.n.channels_per_group;
    channel = first + within;
    last = first + a.n.channels_per_group - 1;
    remainder = static_cast<unsigned>(chunk_begin - within * a.n.spatial);
    spatial = static_cast<unsigned>(a.n.spatial);
    const int64_t reach = static_cast<int64_t>(remainder) + len;
    channels = reach <= spatial ? one : reach <= 2 * a.n.spatial && spatial % V == 0 ? two : many;
    at(0, w0, b0);
    at(1, w1, b1);
  }
  __device__ void at(unsigned c, float& w, float& b) const {
    const int64_t i = min(channel + c, last);
    w = args.n.weight == nullptr ? 1.f : to_float(static_cast<const W*>(args.n.weight)[i]);
    b = args.n.bias == nullptr ? 0.f : to_float(static_cast<const W*>(args.n.bias)[i]);
  }
  __device__ void operator()(int offset, Floats<V>& w, Floats<V>& b) const {
    if (channels != many) {
      const bool second = channels == two && remainder + offset >= spatial;
#pragma unroll
      for (int j = 0; j < V; ++j) {
        w.v[j] = second ? w1 : w0;
        b.v[j] = second ? b1 : b0;
      }
      return;
    }
    unsigned c = (remainder + offset) / spatial;
    unsigned rest = (remainder + offset) - c * spatial;
    float wc, bc;
    at(c, wc, bc);
#pragma unroll
    for (int j = 0; j < V; ++j) {
      if (rest == spatial) {
        rest = 0;
        at(++c, wc, bc);
      }
      w.v[j] = wc;
      b.v[j] = bc;
      ++rest;
    }
  }
};

// Present: all of the parameters the policy knows are there.
template <class Policy, class W, int V, bool Ragged, bool Present>
struct AffineOf {
  using type = AffineByElement<Policy, W, V, Ragged, Present>;
};
template <class W, int V, bool Ragged, bool Present>
struct AffineOf<GroupNormPolicy, W, V, Ragged, Present> {
  using type = AffineByChannel<W, V>;
};

// No affine parameters.
struct AffineNone {
  static constexpr bool same_for_all_rows = false;
  __device__ AffineNone(const RowArgs&, int64_t, int64_t, int) {}
};

template <class W, int V, bool Ragged, bool Present>
struct AffineOf<L1NormPolicy, W, V, Ragged, Present> {
  using type = AffineNone;
};

}  // namespace
}  // namespace normswap
