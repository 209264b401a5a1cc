// What distinguishes the row norms: a policy names a statistic (Moments or Sum), how chunks' are taken, what a row makes
// of it (RowValues) and how an element is normalised: by one formula, or by a fast one for the rows it will do for.
#pragma once

#include "device/behind.cuh"
#include "plan/row_plan.h"
#include "row/row_tile.cuh"

namespace normswap {
namespace {

struct RowValues {
  float mean, rstd;
};

// What the affine parameters of a policy belong to.
enum class Affine { none, by_element, by_channel, with_options };

// Divides numbers that are not negative by one that the host knows: by its reciprocal times 2^64, rounded down, which is at
// most one too few.
struct Quotient {
  int64_t divisor;
  uint64_t factor;
  __device__ int64_t of(int64_t a) const {
    const int64_t quotient = static_cast<int64_t>(__umul64hi(static_cast<uint64_t>(a), factor));
    return quotient + (a - quotient * divisor >= divisor ? 1 : 0);
  }
  // Where the divisor too has 32 bits: the upper half of the factor is its reciprocal times 2^32, rounded down.
  __device__ unsigned of(unsigned a) const {
    const unsigned by = static_cast<unsigned>(divisor), quotient = __umulhi(a, static_cast<unsigned>(factor >> 32));
    return quotient + (a - quotient * by >= by ? 1 : 0);
  }
};

// What the kernels take: RowNorm, how rows are cut, and what would cost every thread instructions to work out.
struct RowArgs {
  RowNorm n;
  int64_t chunks;
  int held_groups, blocks_a_row, chunk_len, chunk_bytes, block_chunks, slots;
  float eps, weight_offset;
  RowSizes sizes;
  Quotient by_rows, by_num_groups, by_spatial, by_sets;  // the last: split, both: of kRowsSplit rows
  Quotient by_sample;                                    // options
  Quotient by_blocks;                                    // that share a row
  bool saves;                                            // a statistic of each row
};

// Elements that tiles may keep as floats: of 16 bits, where some vectors are surely there, more, since less is asked.
template <class Tile>
constexpr int kHeldFloats = Tile::V == 8 && Tile::Whole > 0 ? 32 : 24;

// sums[r] = sum of term(x - means[r], sum so far) over the chunk in tiles[r] (of x, unless Centred); every lane of the
// chunk holds them.
template <bool Centred, class Tile, int Rows, class Term>
__device__ inline void chunk_sums(Tile (&tiles)[Rows], const float (&means)[Rows], float (&sums)[Rows], Term term) {
#pragma unroll
  for (int r = 0; r < Rows; ++r) {
    sums[r] = tiles[r].template partial_sum<Centred>(means[r], term);
    if (Rows * Tile::Slots * Tile::V > kHeldFloats<Tile>) tiles[r].forget();
  }
  lanes_sum<Tile::Lanes>(sums);
}

template <class Tile, int Rows, class Term>
__device__ inline void plain_sums(Tile (&tiles)[Rows], Sum (&out)[Rows], Term term) {
  float sums[Rows] = {};
  chunk_sums<false>(tiles, sums, sums, term);
#pragma unroll
  for (int r = 0; r < Rows; ++r) out[r] = {sums[r]};
}

// 1 / sqrt(sum / cols + eps).
__device__ inline float inverse_root(float sum, const RowArgs& a) { return rsqrtf(__fadd_rn(a.sizes.row.mean_of(sum), a.eps)); }

// y = (x - mean) rstd w + b, rstd = 1 / sqrt(var + eps), biased variance by two passes over the chunk on chip.
struct Centred {
  using Stat = Moments;
  static constexpr bool has_bias = true;
  template <class T>
  static constexpr bool always_fast = true;
  // `size`: elements of the chunks.
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], const Divisor& size, const RowArgs&, Stat (&out)[Rows]) {
    float mean[Rows] = {}, m2[Rows];
    chunk_sums<false>(tiles, mean, mean, [](float x, float into) { return __fadd_rn(into, x); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) mean[r] = size.divide<true>(mean[r]);
    chunk_sums<true>(tiles, mean, m2, [](float d, float into) { return fmaf(d, d, into); });
#pragma unroll
    for (int r = 0; r < Rows; ++r) {
      out[r] = Tile::Whole > 0 || tiles[r].len > 0 ? Stat{mean[r], m2[r], size.value} : Stat{};
    }
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowArgs& a) {
    return {s.mean, inverse_root(s.m2, a)};
  }
  __device__ static float saved_mean(const Stat&, RowValues values, const RowArgs&) { return values.mean; }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float w, float b) {
    return fmaf(__fmul_rn(__fsub_rn(x, row.mean), row.rstd), w, b);
  }
  __device__ static float factor(float w, const RowArgs&) { return w; }
};

struct LayerNormPolicy : Centred {
  static constexpr Affine affine = Affine::by_element;
};
// `w` is the weight times rstd: one product a channel instead of one an element.
struct GroupNormPolicy : Centred {
  static constexpr Affine affine = Affine::by_channel;
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float w, float b) {
    return fmaf(__fsub_rn(x, row.mean), w, b);
  }
};

// The same with GroupOptions: kernels of their own, since those of the norm alone would take more registers.
struct GroupNormBehindPolicy : GroupNormPolicy {};

template <class Policy>
constexpr bool kBehind = std::is_same_v<Policy, GroupNormBehindPolicy>;

// y = x rstd (offset + w), rstd = 1 / sqrt(mean(x^2) + eps); unless Fast x rstd is rounded to T before the product.
struct RMSNormPolicy {
  using Stat = Sum;
  static constexpr Affine affine = Affine::by_element;
  static constexpr bool has_bias = false;
  template <class T>
  static constexpr bool always_fast = sizeof(T) == 4;
  __device__ static bool fast(RowValues, const RowArgs& a) { return !a.n.cast_before_weight; }
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], const Divisor&, const RowArgs&, Stat (&out)[Rows]) {
    plain_sums(tiles, out, [](float x, float into) { return fmaf(x, x, into); });
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowArgs& a) {
    return {0.f, inverse_root(s.sum, a)};
  }
  __device__ static float saved_mean(const Stat&, RowValues, const RowArgs&) { return 0.f; }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float w, float) {
    const float scaled = __fmul_rn(x, row.rstd);
    return __fmul_rn(Fast ? scaled : rounded<T>(scaled), w);
  }
  __device__ static float factor(float w, const RowArgs& a) { return __fadd_rn(w, a.weight_offset); }
};

// y = x / (max(mean|x|, minimum) + eps), the divisor rounded to x's dtype as the expression does.
struct L1NormPolicy {
  using Stat = Sum;
  static constexpr Affine affine = Affine::none;
  static constexpr bool has_bias = false;
  template <class T>
  static constexpr bool always_fast = false;
  template <class Tile, int Rows>
  __device__ static void statistics(Tile (&tiles)[Rows], const Divisor&, const RowArgs&, Stat (&out)[Rows]) {
    plain_sums(tiles, out, [](float x, float into) { return __fadd_rn(into, fabsf(x)); });
  }
  template <class T>
  __device__ static RowValues finish(const Stat& s, const RowArgs& a) {
    const float divisor = l1_divisor<T>(__fdiv_rn(s.sum, a.sizes.row.value), a.n.eps, a.n.minimum);
    return {divisor, Divisor::of(divisor).reciprocal};
  }
  __device__ static float saved_mean(const Stat& s, RowValues, const RowArgs& a) {
    return __fdiv_rn(s.sum, a.sizes.row.value);
  }
  __device__ static bool fast(RowValues row, const RowArgs&) { return Divisor{row.mean, row.rstd}.fast(); }
  template <class T, bool Fast>
  __device__ static float apply(float x, RowValues row, float, float) {
    return Divisor{row.mean, row.rstd}.template divide<Fast>(x);
  }
};

// Weights of its own that an element may have.
template <class Policy>
constexpr int kWeights = Policy::affine != Affine::by_element ? 0 : Policy::has_bias ? 2 : 1;

// --- affine parameters -------------------------------------------------------------------------------------------

// What stands for a chunk's weights or biases where there are none: as long, so that they are found alike.
template <class W>
struct ChunkOf {
  uint4 vectors[kChunk * sizeof(W) / 16];
  constexpr explicit ChunkOf(unsigned word) : vectors{} {
    for (uint4& vector : vectors) vector.x = vector.y = vector.z = vector.w = word;
  }
};
template <class W>
constexpr unsigned kOne = std::is_same_v<W, float> ? 0x3f800000u : std::is_same_v<W, Half> ? 0x3c003c00u : 0x3f803f80u;
template <class W>
__device__ const ChunkOf<W> kOnes{kOne<W>};
__device__ const ChunkOf<float> kZeros{0u};

// V values in their own dtype, as words (see Tile); float ones of 16-bit rows take two accesses.
template <class W, int V>
struct Parameters {
  static constexpr int per = 16 / static_cast<int>(sizeof(W));
  uint4 words[V / per];

  __device__ void load_if(bool there, const W* data) {
#pragma unroll
    for (int i = 0; i < V / per; ++i) normswap::load_if(there, words[i], data + i * per);
  }
  // Only the first `count`.
  __device__ void load_some(const W* data, int count) {
#pragma unroll
    for (int i = 0; i < V / per; ++i) words[i] = load_first(data + i * per, count - i * per);
  }
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < V / per; ++i) normswap::forget(words[i]);
  }
  __device__ void floats(Floats<V>& to) const {
#pragma unroll
    for (int i = 0; i < V / per; ++i) {
      float some[per];
      floats_of<W>(words[i], some);
#pragma unroll
      for (int j = 0; j < per; ++j) to.v[i * per + j] = some[j];
    }
  }
};

// Whether rows of 16-bit elements have float32 parameters. These are loaded when they are needed (values_at): kept, they
// would take twice the registers.
template <class T>
__host__ __device__ inline bool has_wide_weights(const RowArgs& args) {
  return sizeof(T) == 2 && args.n.weight_dtype == DType::f32;
}

// Tiles of warps that surely have all of a chunk (launch_held): rows with such parameters, or whose y is narrow, do not
// come in them, since the registers for that would be missed.
template <class Tile>
constexpr bool kAllThere = Tile::InRegisters && Tile::Whole == Tile::Slots;

template <class T, class Tile>
constexpr bool kMayBeWide = sizeof(T) == 2 && !kAllThere<Tile>;

// Those of Count of a lane's vectors of V elements, one value an element of the row: loaded before they are needed, used
// for several rows.
template <class Policy, class T, int V, int Count>
struct AffineByElement {
  static constexpr int count = Count;
  Parameters<T, V> weight[Count], bias[Count];  // bias: where Policy::has_bias

  // Of all vectors, if there is room.
  template <class Tile>
  __device__ void load_ahead(const RowArgs& args, int64_t begin, const Tile& tile) {
    if (Count == Tile::Slots) load(args, begin, tile, 0);
  }
  // Of the vectors from `first` on of the chunk that begins at `begin`: of those [from, to).
  template <class Tile>
  __device__ void load(const RowArgs& args, int64_t begin, const Tile& tile, int first, int from = 0, int to = Count) {
    if (kMayBeWide<T, Tile> && has_wide_weights<T>(args)) return;
    load_whole(weight, args.n.weight, kOnes<T>.vectors, begin, tile, first, from, to);
    if constexpr (Policy::has_bias) load_whole(bias, args.n.bias, kZeros.vectors, begin, tile, first, from, to);
    if constexpr (Tile::Ragged) {
#pragma unroll
      for (int i = from; i < to; ++i) {
        const int k = first + i;
        if (k >= Tile::Slots || !tile.inside(k) || !is_cut(tile, k)) continue;
        const int64_t at = begin + Tile::offset(k);
        const int left = tile.len - Tile::offset(k);
        weight[i].load_some(at_or(args.n.weight, at, kOnes<T>.vectors), left);
        if constexpr (Policy::has_bias) bias[i].load_some(at_or(args.n.bias, at, kZeros.vectors), left);
      }
    }
  }
  __device__ void forget() {
#pragma unroll
    for (int i = 0; i < Count; ++i) {
      weight[i].forget();
      if constexpr (Policy::has_bias) bias[i].forget();
    }
  }
  __device__ void values(int i, const RowArgs& args, Floats<V>& w, Floats<V>& b) const {
    weight[i].floats(w);
    if constexpr (Policy::has_bias) bias[i].floats(b);
#pragma unroll
    for (int j = 0; j < V; ++j) w.v[j] = Policy::factor(w.v[j], args);
  }

 private:
  // Whether the row ends in vector k: what follows may not be read.
  template <class Tile>
  __device__ static bool is_cut(const Tile& tile, int k) {
    return Tile::Ragged && k >= Tile::Whole && tile.len - Tile::offset(k) < V;
  }
  __device__ static const T* at_or(const void* data, int64_t at, const uint4* absent) {
    return data != nullptr ? static_cast<const T*>(data) + at : reinterpret_cast<const T*>(absent);
  }
  template <class Tile>
  __device__ static void load_whole(Parameters<T, V> (&into)[Count], const void* data, const uint4* absent, int64_t begin,
                                    const Tile& tile, int first, int from, int to) {
    const T* mine = at_or(data, begin, absent) + Tile::offset(0);
#pragma unroll
    for (int i = from; i < to; ++i) {
      const int k = first + i;
      if (k < Tile::Slots) into[i].load_if(tile.inside(k) && !is_cut(tile, k), mine + k * Tile::Lanes * V);
    }
  }
};

// Those of one vector, of a chunk whose parameters each lane keeps in shared memory.
template <class Policy, class T, class Tile>
struct AffineKept : AffineByElement<Policy, T, Tile::V, 1> {
  static constexpr int weights = kWeights<Policy>;
  uint4* mine;

  // Starts copying them there.
  __device__ void keep(const RowArgs& args, int64_t begin, const Tile& tile, uint4* shared) {
    mine = shared + threadIdx.x / 32 * (Tile::Slots * weights * 32) + threadIdx.x % 32;
    if (kMayBeWide<T, Tile> && has_wide_weights<T>(args)) return;
    copy(args.n.weight, kOnes<T>.vectors, begin, tile, mine);
    if constexpr (Policy::has_bias) copy(args.n.bias, kZeros.vectors, begin, tile, mine + 32);
  }
  __device__ void load(const RowArgs&, int64_t, const Tile&, int k) {
    this->weight[0].words[0] = mine[k * weights * 32];
    if constexpr (Policy::has_bias) this->bias[0].words[0] = mine[(k * weights + 1) * 32];
  }

 private:
  __device__ static void copy(const void* data, const uint4* absent, int64_t begin, const Tile& tile, uint4* to) {
    const T* from = (data != nullptr ? static_cast<const T*>(data) + begin : reinterpret_cast<const T*>(absent)) + Tile::offset(0);
#pragma unroll
    for (int k = 0; k < Tile::Slots; ++k) {
      if (tile.inside(k)) copy_async(to + k * weights * 32, from + k * Tile::Lanes * Tile::V);
    }
  }
};

struct AffineNone {
  template <class Tile>
  __device__ void load_ahead(const RowArgs&, int64_t, const Tile&) {}
};

}  // namespace
}  // namespace normswap
