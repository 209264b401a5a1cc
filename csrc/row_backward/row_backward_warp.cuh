// What a warp of the backward does with the rows of a turn: their sums, then their dx, and the sums of its columns.
#pragma once

#include "device/activation.cuh"
#include "row_backward/row_backward_policy.cuh"
#include "row_backward/row_backward_tile.cuh"

namespace normswap {
namespace {

// A vector of weights or biases, `absent` where there are none.
template <class Tile>
__device__ inline void column_values(const ChannelVector& vector, int64_t begin, const Tile& tile, int k, float absent,
                                     float (&out)[Tile::V]) {
  using X = typename Tile::X;
  const int64_t at = begin + tile.offset(k);
  if (vector.data == nullptr) {
#pragma unroll
    for (int j = 0; j < Tile::V; ++j) out[j] = absent;
  } else if (sizeof(X) == 4 || vector.dtype == DType::f32) {
    load_values(static_cast<const float*>(vector.data) + at, tile.inside(k), out);
  } else {
    load_values(static_cast<const X*>(vector.data) + at, tile.inside(k), out);
  }
}

template <class Policy, class G, class Tile, Around A>
struct BackwardWarp {
  using X = typename Tile::X;
  using Slot = BackwardSlot<G, Tile, A>;
  using Row = typename Policy::Row;
  static constexpr int V = Tile::V, Slots = Tile::Slots, Group = Tile::Group;
  static constexpr int Weighted = Policy::has_weight ? Slots : 1, Biased = Policy::has_bias ? Slots : 1;
  const BackwardArgs& args;
  int64_t begin;  // the chunk's first element
  Tile tile;      // of the chunk: of a row that is there
  int64_t at;     // the next element of dx that this lane makes
  float w[Weighted][V], dw[Weighted][V], db[Biased][V];

  __device__ void load_weights() {
    if constexpr (Policy::has_weight) {
#pragma unroll
      for (int k = 0; k < Slots; ++k) {
        column_values(args.n.weight, begin, tile, k, 1.f, w[k]);
#pragma unroll
        for (int j = 0; j < V; ++j) {
          w[k][j] = __fadd_rn(w[k][j], args.weight_offset);
          dw[k][j] = 0.f;
          if (Policy::has_bias) db[k][j] = 0.f;
        }
      }
    }
  }

  // The sums of a turn's rows over the chunk, `left` rows before the end of the piece; every lane of a row holds them. Adds
  // to those of the columns.
  __device__ float2 sums(const Slot& from, int left) {
    const Tile mine = tile_of(left);
    const Row values = row_of(from, mine);
    float sum[2] = {}, other[2] = {};
#pragma unroll
    for (int first = 0; first < Slots; first += Group) {
      if (!mine.any_inside(first)) continue;
      float x[Group][V], dy[Group][V];
      load(from, mine, first, false, x, dy);
      if constexpr (kMayBeActive<A>) {
        if (has_activation()) {
          derive(mine, first, values, x, dy);
          if (keeps()) keep(from, mine, first, dy);
        }
      }
#pragma unroll
      for (int i = 0; i < Group; ++i) {
        const int k = first + i;
        if (V > 1 && i > 0 && !mine.any_inside(k)) continue;
#pragma unroll
        for (int j = 0; j < V; ++j) {
          const float xhat = Policy::normalised(x[i][j], values), g = weighted(dy[i][j], k, j);
          Policy::add(g, xhat, &sum[(i * V + j) % 2], &other[(i * V + j) % 2]);
          if constexpr (Policy::has_weight) dw[k][j] = fmaf(dy[i][j], xhat, dw[k][j]);
          if constexpr (Policy::has_bias) db[k][j] = __fadd_rn(db[k][j], dy[i][j]);
        }
      }
    }
    float all[Policy::sums];
    all[0] = __fadd_rn(sum[0], sum[1]);
    if constexpr (Policy::sums == 2) all[1] = __fadd_rn(other[0], other[1]);
    lanes_sum<Tile::Lanes>(all);
    return {all[0], Policy::sums == 2 ? all[Policy::sums - 1] : 0.f};
  }

  // Stores dx of a turn's rows.
  __device__ void gradient(const Slot& from, int left, float2 total) const {
    const Tile mine = tile_of(left);
    const Row values = row_of(from, mine);
    const Coefficients c = Policy::finish(total.x, total.y, args.by_cols, values);
    X* const out_at = static_cast<X*>(args.n.dx) + at;
#pragma unroll
    for (int first = 0; first < Slots; first += Group) {
      if (!mine.any_inside(first)) continue;
      float x[Group][V], dy[Group][V];
      load(from, mine, first, keeps(), x, dy);
      if constexpr (A == Around::options) {
        if (!keeps() && has_activation()) derive(mine, first, values, x, dy);
      }
#pragma unroll
      for (int i = 0; i < Group; ++i) {
        const int k = first + i;
        if (V > 1 && i > 0 && !mine.any_inside(k)) continue;
        float out[V];
#pragma unroll
        for (int j = 0; j < V; ++j) out[j] = Policy::gradient(x[i][j], weighted(dy[i][j], k, j), values, c);
        if (!mine.inside(k)) continue;
        constexpr int apart = Tile::Lanes * V;
        if constexpr (A != Around::nothing) add_sum_grad(from, mine, k, at + k * apart, out);
        store(out_at + k * apart, out);
        if constexpr (A != Around::nothing && sizeof(X) == 4 && V == 4) store_apart(at + k * apart, out);
      }
    }
  }

  // What the second pass needs to know of a turn's rows.
  __device__ float2 known_total(const Slot& from) const {
    const float* values = from.row_values();
    return {values[2], values[3]};
  }

 private:
  // This lane's row of the turn; its tile is empty where there is none.
  __device__ Tile tile_of(int left) const {
    Tile mine = tile;
    if (Tile::Rows > 1 && Tile::sub_row() >= left) mine.len = 0;
    return mine;
  }
  // Zeros for a row that is not there: what its slot holds may be no number, and what is added to columns must be 0.
  __device__ Row row_of(const Slot& slot, const Tile& mine) const {
    const float* values = slot.row_values();
    const bool there = Tile::Rows == 1 || mine.len > 0;
    return Policy::template row<X>(there ? values[0] : 0.f, there ? values[1] : 0.f, args.n);
  }
  __device__ float weighted(float dy, int k, int j) const {
    if constexpr (Policy::has_weight) return __fmul_rn(dy, w[k][j]);
    return dy;
  }
  __device__ static void store(X* to, const float (&out)[V]) {
    if constexpr (V == 1) {
      *to = from_float<X>(out[0]);
    } else {
      store_words(to, words_of<X>(out));
    }
  }
  // That of the residual.
  __device__ void store_apart(int64_t at, const float (&out)[V]) const {
    if (args.n.dresidual == nullptr) return;
    const float values[8] = {out[0], out[1], out[2], out[3]};
    const uint4 words = args.n.residual_dtype == DType::f16 ? words_of<Half>(values) : words_of<BFloat16>(values);
    *reinterpret_cast<uint2*>(static_cast<uint16_t*>(args.n.dresidual) + at) = {words.x, words.y};
  }
  __device__ void add_sum_grad(const Slot& from, const Tile& mine, int k, int64_t at, float (&out)[V]) const {
    if (args.n.sum_grad == nullptr) return;
    float more[V];
    if (args.p.sum_bytes > 0) {
      from.load_sum(mine, k, more);
    } else {
      load_values(static_cast<const X*>(args.n.sum_grad) + at, true, more);
    }
#pragma unroll
    for (int j = 0; j < V; ++j) out[j] = __fadd_rn(out[j], more[j]);
  }

  __device__ static void load(const Slot& from, const Tile& mine, int first, bool kept, float (&x)[Group][V],
                              float (&dy)[Group][V]) {
#pragma unroll
    for (int i = 0; i < Group; ++i) from.load(mine, first + i, kept, x[i], dy[i]);
  }
  __device__ bool has_activation() const { return args.n.activation.code != Activation::none; }
  __device__ bool keeps() const { return A == Around::wide || (A == Around::options && args.p.keeps); }
  // dy by way of the activation; 0 stays so.
  __device__ void derive(const Tile& mine, int first, const Row& values, const float (&x)[Group][V],
                         float (&dy)[Group][V]) const {
#pragma unroll
    for (int i = 0; i < Group; ++i) {
      const int k = first + i;
      float b[V], z[V];
      column_values(args.n.bias, begin, mine, k, 0.f, b);
#pragma unroll
      for (int j = 0; j < V; ++j) {
        z[j] = rounded<G>(Policy::template output<X>(Policy::normalised(x[i][j], values), w[k][j], b[j], args.n));
      }
      times_slope<G>(args.n.activation, z, dy[i]);
#pragma unroll
      for (int j = 0; j < V; ++j) dy[i][j] = mine.inside(k) ? dy[i][j] : 0.f;
    }
  }
  // For the gradient of these rows.
  __device__ static void keep(const Slot& from, const Tile& mine, int first, const float (&dy)[Group][V]) {
#pragma unroll
    for (int i = 0; i < Group; ++i) from.keep(mine, first + i, dy[i]);
  }
};

}  // namespace
}  // namespace normswap
