// Normalisation with statistics down the columns of (batch, rows, channels) memory: scale -> BatchNorm (batch = 1, a
// group is one channel) and GroupNorm of channels_last tensors (a batch entry a sample). column_plan.h says how columns
// are cut; the kernels below are the regimes:
//   column_block    block, cluster: the pieces of a slab lie in shared memory of a block, or of the blocks of a cluster
//   column_partial, column_finish, column_apply    split: for slabs none of these holds; the input is read twice
#pragma once

#include "column/column_statistics.cuh"
#include "device/launch.h"
#include "plan/make_column_plan.h"

namespace normswap {
namespace {

constexpr int kFinishThreads = 64;
constexpr int kBlockUnroll = 2;  // of column_block: short code, since a block that starts alone waits for every line of it

// A thread's vectors of a piece into its own room in shared memory, without waiting: vector i at stage[i * threads].
template <class T, int V>
__device__ inline void load_async(const ColumnArgs& a, const Piece& piece, Pack<T, V>* stage) {
  const T* x = static_cast<const T*>(a.x) + piece.offset;
  if constexpr (sizeof(Pack<T, V>) == 16) {
    const int batch = (a.slots + kBatches - 1) / kBatches;
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      const int end = min(piece.count, (b + 1) * batch);
#pragma unroll 1
      for (int i = b * batch; i < end; ++i, x += a.step, stage += a.threads) copy_async(stage, x);
      end_batch();
    }
  } else {
#pragma unroll 4
    for (int i = 0; i < piece.count; ++i, x += a.step) stage[i * a.threads] = Pack<T, V>::load(x);
  }
}

// Statistics of the piece that is on its way to `stage`, into the block's rows of them.
template <class T, int V>
__device__ inline void hand_on_piece(const ColumnArgs& a, const Column<V>& at, int count, const Sizes& sizes,
                                     const Pack<T, V>* stage, float2* sums) {
  const auto wait = [](int batch) { wait_for_all_but<kBatches - 1>(kBatches - 1 - batch); };
  const auto vector = [&](int i) { return stage[i * a.threads]; };
  with_parts<V>(a, [&](auto n) { hand_on<decltype(n)::value>(a, at, count, sizes, wait, vector, sums); });
}

// `count` of the thread's vectors in shared memory, normalised, with what stands behind: the first belongs at `offset`. Those
// of the residual are on their way some at a time. All tensors lie at multiples of 16 bytes.
template <class T, class Y, int V, Source From>
__device__ inline void store_staged_behind(const ColumnArgs& a, const ChannelAffine<T, V, From>& affine,
                                           const Pack<T, V>* stage, int64_t offset, int count) {
  constexpr int per = 16 / static_cast<int>(sizeof(Y)), parts = V / per, some = parts > 1 ? 1 : 2;
  using Part = Pack<Y, per>;
  const Y* residual = static_cast<const Y*>(a.n.behind.residual);
  residual = residual == nullptr ? nullptr : residual + offset;
  Y* y = static_cast<Y*>(a.n.behind.y) + offset;
  with_activation<Y, per, From>(a.n.activation, [&](auto activate) {
#pragma unroll 1
    for (int i = 0; i < count; i += some, y += some * a.step) {
      Part more[some][parts];
      if (residual != nullptr) {
#pragma unroll
        for (int k = 0; k < some * parts; ++k) {
          const int vector = k / parts, part = k % parts;
          if (i + vector < count) more[vector][part] = Part::load(residual + (i + vector) * a.step + part * per);
        }
      }
#pragma unroll
      for (int k = 0; k < some; ++k) {
        if (i + k >= count) break;
        float out[V];
        affine.of(Pack<T, V>::load(stage[(i + k) * a.threads].v), out);
#pragma unroll
        for (int part = 0; part < parts; ++part) {
          float values[per];
#pragma unroll
          for (int j = 0; j < per; ++j) values[j] = out[part * per + j];
          Part norm = Part::of(values);
          if (residual != nullptr) norm = added(norm, more[k][part]);
          activate(norm).store(y + k * a.step + part * per);
        }
      }
    }
  });
}

// The same to a float32 y, of neighbouring threads in pairs.
template <class T, int V, Source From>
__device__ inline void store_staged_wide(const ColumnArgs& a, const ChannelAffine<T, V, From>& affine,
                                         const Pack<T, V>* stage, int64_t offset, int count) {
  with_activation<float, 4, From>(a.n.activation, [&](auto activate) {
    const int most = __reduce_max_sync(kWholeWarp, count);
#pragma unroll kBlockUnroll
    for (int i = 0; i < most; ++i) {
      float out[V] = {};
      if (i < count) affine.of(Pack<T, V>::load(stage[i * a.threads].v), out);
      store_wide(a.n.behind, out, offset + i * a.step, i < count, activate);
    }
  });
}

// The thread's vectors of a piece in shared memory, normalised.
template <class T, int V, Source From>
__device__ inline void store_staged(const ColumnArgs& a, const ChannelAffine<T, V, From>& affine, const Pack<T, V>* stage,
                                    const Piece& at) {
  const GroupOptions& behind = a.n.behind;
  if constexpr (From == Source::group && V > 1) {
    if (behind.any && on_boundary(behind)) {
      if constexpr (V == 8) {
        if (a.wide) return store_staged_wide(a, affine, stage, at.offset, at.count);
      }
      if (behind.wide) return store_staged_behind<T, float>(a, affine, stage, at.offset, at.count);
      return store_staged_behind<T, T>(a, affine, stage, at.offset, at.count);
    }
  }
  if (From == Source::group && behind.any) {
#pragma unroll 1
    for (int i = 0; i < at.count; ++i) {
      affine.apply(a, Pack<T, V>::load(stage[i * a.threads].v), at.offset + i * a.step);
    }
    return;
  }
  T* y = static_cast<T*>(a.n.y) + at.offset;
  with_activation<T, V, From>(a.n.activation, [&](auto activate) {
#pragma unroll kBlockUnroll
    for (int i = 0; i < at.count; ++i, y += a.step) {
      activate(affine.of(Pack<T, V>::load(stage[i * a.threads].v))).store(y);
    }
  });
}

template <class T, int V, Source From>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks) column_block(const ColumnArgs args) {
  extern __shared__ __align__(16) char shared[];
  __shared__ Inbox inbox;
  const int pieces = args.pieces;
  Pack<T, V>* stage = reinterpret_cast<Pack<T, V>*>(shared) + thread();
  const Parameters<From> parameters(args, shared + args.slots * args.threads * sizeof(Pack<T, V>));
  float2* sums = reinterpret_cast<float2*>(parameters.arrays + parameters.kArrays * parameters.across);
  float2* parts = sums + (args.row_sums << args.log_side);  // (groups, pieces), of the slab
  if (pieces > 1) {
    if (thread() < 32) inbox.open(args.p.groups * pieces * sizeof(float2));
    cluster_arrive_with_inboxes();
  }
  const Column<V> column(args);
  const Piece at = Piece::of_slab(args, column, static_cast<int>(blockIdx.x));
  const Sizes sizes = at.sizes(args);
  follow_predecessor();
  let_successor_start();
  load_async(args, at, stage);
  parameters.fetch(args, at.strip);
  hand_on_piece<T, V>(args, column, at.count, sizes, stage, sums);
  __syncthreads();
  if (pieces > 1) cluster_wait();  // every block of the cluster runs
  unite_sums(args, sizes, sums, [&](int group, int lane, float2 moments) {
    float2* part = parts + group * pieces + at.piece;
    if (pieces == 1 && lane == 0) *part = moments;
    if (pieces == 1) return;
    for (int rank = lane; rank < pieces; rank += args.run) send_to_block(part, inbox, rank, moments);
  });
  if (pieces > 1) {
    inbox.wait();
  } else {
    __syncthreads();
  }
  parameters.set(args, at.strip, [&](int channel) {
    const int group = args.by_group_width.quotient(channel);
    const bool save = at.piece == 0 && channel == group * args.group_width;
    const int64_t index = at.first_group(args) + group;
    return finish(args, index, unite_few(args, parts + group * pieces), save);
  });
  __syncthreads();
  if (at.count == 0) return;
  const ChannelAffine<T, V, From> affine(parameters, column.channel);
  store_staged(args, affine, stage, at);
}

// A block takes piece after piece; the next one's loads are under way while the statistics of one are united.
template <class T, int V>
__global__ void __launch_bounds__(kColumnThreads, kColumnBlocks) column_partial(const ColumnArgs args) {
  extern __shared__ __align__(16) char shared[];
  float2* sums = reinterpret_cast<float2*>(shared + args.slots * args.threads * sizeof(Pack<T, V>));
  Pack<T, V>* stage = reinterpret_cast<Pack<T, V>*>(shared) + thread();
  const Column<V> column(args);
  const int stride = static_cast<int>(gridDim.x), last = static_cast<int>(args.p.items) - stride;
  int item = static_cast<int>(blockIdx.x);
  Piece next = Piece::in_memory(args, column, item);
  load_async(args, next, stage);
  for (;;) {
    const Piece at = next;
    const Sizes sizes = at.sizes(args);
    hand_on_piece<T, V>(args, column, at.count, sizes, stage, sums);
    const bool more = item < last;
    if (more) {
      item += stride;
      next = Piece::in_memory(args, column, item);
      load_async(args, next, stage);
    }
    if (!more) let_successor_start();
    __syncthreads();
    unite_sums(args, sizes, sums, [&](int group, int lane, float2 moments) {
      if (lane == 0) args.parts[(at.slab(args) * args.p.groups + group) * args.pieces + at.piece] = moments;
    });
    if (!more) return;
    __syncthreads();
  }
}

// As many groups of a slab as the block can take at once, by runs of lanes.
__global__ void __launch_bounds__(kFinishThreads) column_finish(const ColumnArgs args) {
  let_successor_start();
  const int run = thread() >> args.p.log_sharing, lane = thread() & ((1 << args.p.log_sharing) - 1);
  const int mine = static_cast<int>(blockIdx.y) * (kFinishThreads >> args.p.log_sharing) + run;
  const Piece at = Piece::of_slab(args, Column<1>(args), static_cast<int>(blockIdx.x) * args.pieces);
  const int groups = at.groups(args), group = min(mine, groups - 1);
  const int64_t index = at.first_group(args) + group, from = at.slab(args) * args.p.groups + group;
  follow_predecessor();
  const float2 united = unite_pieces(args, args.parts + from * args.pieces);
  if (lane == 0 && mine < groups) args.finals[index] = finish(args, index, united, true);
}

// Threads of a block that stores, and such blocks on a multiprocessor.
template <Source From>
constexpr int kApplyThreads = From == Source::group ? kSplitThreads : kColumnThreads;
template <Source From>
constexpr int kApplyBlocks = From == Source::group ? kSplitBlocks : kColumnBlocks;

// A strip is any channels, not of whole groups. Wide: see ColumnArgs::wide.
template <class T, int V, Source From, bool Wide>
__global__ void __launch_bounds__(kApplyThreads<From>, kApplyBlocks<From>) column_apply(const ColumnArgs args) {
  extern __shared__ __align__(16) char shared[];
  const Parameters<From> parameters(args, shared);
  const Column<V> column(args);
  // Backwards: what column_partial read last is still in the L2.
  const Piece at = Piece::in_memory(args, column, static_cast<int>(gridDim.x - 1 - blockIdx.x));
  const T* x = static_cast<const T*>(args.x) + at.offset;
  int64_t y = at.offset;
  constexpr int at_once = Wide ? 2 : V > 4 ? kColumnSlots / 2 : kColumnSlots;
  Pack<T, V> packs[at_once];
  int left = at.count;
  const auto load_some = [&] {
#pragma unroll
    for (int i = 0; i < at_once; ++i) {
      if (i < left) packs[i] = Pack<T, V>::load(x + i * args.step);
    }
    x += at_once * args.step;
  };
  load_some();
  parameters.fetch(args, at.strip);
  __syncthreads();
  follow_predecessor();
  const float2* values = args.finals + at.batch * args.n.num_groups;
  const int first = at.strip * args.width;
  parameters.set(args, at.strip, [&](int channel) { return __ldcg(values + args.by_group_width.quotient(first + channel)); });
  __syncthreads();
  if (left <= 0) return;
  const ChannelAffine<T, V, From> affine(parameters, column.channel);
  if constexpr (Wide) {
    const int most = __reduce_max_sync(kWholeWarp, left);
    for (int done = 0; done < most; done += at_once, left -= at_once, y += at_once * args.step) {
      if (done > 0) load_some();
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        float out[V];
        affine.of(packs[i], out);
        store_wide(args.n.behind, out, y + i * args.step, i < left,
                   [&](const Pack<float, 4>& sum) { return activated(sum, args.n.activation); });
      }
    }
  } else {
    for (;;) {
#pragma unroll
      for (int i = 0; i < at_once; ++i) {
        packs[i].forget();
        if (i < left) affine.apply(args, packs[i], y + i * args.step);
      }
      left -= at_once;
      if (left <= 0) return;
      y += at_once * args.step;
      load_some();
    }
  }
}

// --- launch ------------------------------------------------------------------------------------------------------

// The statistics, where there are any, are on their way to `finals`.
template <class T, int V, Source From>
cudaError_t launch_apply(const ColumnArgs& a, bool overlap, cudaStream_t stream) {
  const int shared = parameter_bytes(a.p, Parameters<From>::kArrays);
  const LaunchShape shape{grid_of(a.p.items), a.threads, shared, 1, overlap};
  if constexpr (From == Source::group && V == 8) {
    if (a.wide) return launch_block<column_apply<T, V, From, true>>(a, shape, stream);
  }
  return launch_block<column_apply<T, V, From, false>>(a, shape, stream);
}

template <class T, int V, Source From>
cudaError_t launch_split(const ColumnArgs& a, cudaStream_t stream) {
  cudaError_t error = launch_block<column_partial<T, V>>(a, {grid_of(a.p.grid), a.threads, a.p.shared, 1, false}, stream);
  if (error != cudaSuccess) return error;
  const int64_t runs = ceil_div(a.p.groups, kFinishThreads >> a.p.log_sharing);
  const dim3 slabs(static_cast<unsigned>(a.p.items / a.p.pieces), static_cast<unsigned>(runs));
  error = launch_block<column_finish>(a, {slabs, kFinishThreads, 0, 1, a.p.overlap}, stream);
  if (error != cudaSuccess) return error;
  ColumnPlan plan;
  if (!make_apply_plan(a.n.batch, a.n.rows, a.n.channels, sizeof(T), kSplitBlock, &plan)) return cudaErrorInvalidConfiguration;
  ColumnArgs apply(a.n, plan);
  apply.finals = a.finals;
  return launch_apply<T, V, From>(apply, a.p.overlap, stream);
}

template <class T, int V, Source From>
cudaError_t launch_columns(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  const ColumnArgs args(n, p);
  if (p.regime == Regime::split) return launch_split<T, V, From>(args, stream);
  const LaunchShape shape{grid_of(p.grid), p.threads, p.shared, static_cast<int>(p.pieces), p.overlap};
  return launch_block<column_block<T, V, From>>(args, shape, stream);
}

template <class T, Source From>
cudaError_t launch_vec(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  if (p.vec > 1) return launch_columns<T, 16 / static_cast<int>(sizeof(T)), From>(n, p, stream);
  return launch_columns<T, 1, From>(n, p, stream);
}

template <Source From>
cudaError_t launch_statistics(const ChannelNorm& n, const ColumnPlan& p, cudaStream_t stream) {
  switch (n.dtype) {
    case DType::f32: return launch_vec<float, From>(n, p, stream);
    case DType::f16: return launch_vec<Half, From>(n, p, stream);
    default: return launch_vec<BFloat16, From>(n, p, stream);
  }
}

}  // namespace
}  // namespace normswap
