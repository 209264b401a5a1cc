// BatchNorm in one launch: a cluster has a strip in shared memory between its statistics and what they are for, each of its
// blocks a piece. The sums of all pieces are told to every block, which unites them in their order.
#pragma once

#include "batch_norm/batch_norm_channel.cuh"
#include "device/cluster.cuh"
#include "device/copy.cuh"

namespace normswap {
namespace {

constexpr int kHeldBlocks = 3;   // of a multiprocessor, as far as registers go; with a residual one less
constexpr int kHeldBatches = 4;  // of a thread's vectors, which arrive one after the other ...
constexpr int kTaken = 8;        // ... each so many, or some times as many

// The strip's piece that a block of a cluster has, as PieceVectors counts.
__device__ inline unsigned held_item(const BatchNormArgs& a) {
  const unsigned pieces = static_cast<unsigned>(a.p.pieces);
  return blockIdx.x % pieces * static_cast<unsigned>(a.p.strips) + blockIdx.x / pieces;
}

// A thread's vectors of some tensors. It copies them itself, and nobody else looks; but vectors of 8 bytes, if they lie so,
// are copied by two threads in turns, 16 bytes for both, which do not go through the L1.
template <class T, int V, bool Even, int Tensors>
struct HeldVectors {
  using Vector = Words<T, V>;
  static constexpr int kBytes = static_cast<int>(sizeof(Vector));
  const Vectors<V, Even>& vectors;
  Vector* mine;
  int count, batch, apart;

  __device__ HeldVectors(const Vectors<V, Even>& of, void* memory)
      : vectors(of), mine(static_cast<Vector*>(memory) + thread()), count(of.count()) {
    const int slots = of.a.piece_rows / of.a.side, some = kHeldBatches * kTaken;
    batch = (slots + some - 1) / some * kTaken;
    apart = slots * static_cast<int>(blockDim.x);
  }
  __device__ int row(int i) const { return vectors.first + i * vectors.a.side; }
  // Of tensor t.
  __device__ Vector& at(int i, int t = 0) const { return mine[t * apart + i * static_cast<int>(blockDim.x)]; }
  // Starts copying.
  __device__ void stage(const void* const (&tensors)[Tensors]) const {
    const bool pairs = kBytes == 8 && vectors.a.p.pairs;
    const int step = pairs ? 2 : 1, before = pairs ? thread() % 2 : 0;
#pragma unroll 1
    for (int b = 0; b < kHeldBatches; ++b) {
      const int end = min(count, (b + 1) * batch);
      for (int i = b * batch + before; i < end; i += step) {
        const int64_t from = vectors.at(row(i)) - before * kBytes;
#pragma unroll
        for (int t = 0; t < Tensors; ++t) {
          const unsigned to = shared_address(&at(i, t) - before);
          const char* x = static_cast<const char*>(tensors[t]) + from;
          if (kBytes == 16 || pairs) {
            copy_async(to, x);
          } else {
            copy_async_pair(to, x);
          }
        }
      }
      end_batch();
    }
  }
  // Starts bringing to the L2 what `bytes` has for the vectors, a byte each.
  __device__ void fetch(const unsigned char* bytes) const {
#pragma unroll 1
    for (int i = 0; i < count; ++i) asm volatile("prefetch.global.L2 [%0];" ::"l"(bytes + vectors.at(row(i)) / kBytes));
  }
  // Calls with(first, end) for the vectors of a batch once they are there. The warp calls.
  template <class With>
  __device__ void for_each_batch(With with) const {
#pragma unroll
    for (int b = 0; b < kHeldBatches; ++b) {
      wait_for_all_but<kHeldBatches - 1>(kHeldBatches - 1 - b);
      __syncwarp();
      with(b * batch, min(count, (b + 1) * batch));
    }
  }
};

// What a block has in shared memory besides its vectors: what its threads hand on, what the blocks of the cluster tell each
// other of the strip's channels, what these had before and what comes of it.
template <class Part, class Before, class Finished>
struct HeldShared {
  Handed<kBatchNormVec> handed;
  Part parts[kHeldChannels][kMaxCluster];
  Before before[kHeldChannels];
  Finished finished[kHeldChannels];

  // What this block has of a channel, to all of them.
  __device__ void tell(const BatchNormArgs& a, int channel, const Part& part) {
    const int pieces = static_cast<int>(a.p.pieces), rank = static_cast<int>(blockIdx.x % static_cast<unsigned>(pieces));
    for (int to = 0; to < pieces; ++to) store_in_block(&parts[channel][rank], to, part);
  }
  // Once all have told, finish(channel of the strip, unite(lanes, first, visit)) by a run of lanes, for `finished`. The block
  // calls.
  template <class Unite, class Finish>
  __device__ void finish(const PieceVectors<kBatchNormVec>& of, Unite unite, Finish finish) {
    static_assert(kHeldChannels * kMaxCluster <= kBatchNormThreads / 2);  // a block has more than half of them
    cluster_arrive();
    cluster_wait();
    const int channels = of.channels(), lane = thread() % kMaxCluster;
    if (thread() / 32 * (32 / kMaxCluster) < channels) {  // the warp has some
      const int channel = thread() / kMaxCluster, known = min(channel, channels - 1);
      const auto united = unite(kMaxCluster, parts[known][0], [&](auto with) {
        if (lane < of.a.p.pieces) with(parts[known][lane]);
      });
      if (lane == 0 && channel == known) finished[channel] = finish(channel, united);
    }
    __syncthreads();
  }
};

// Of one block of the cluster: it stores what the channels have in common.
__device__ inline bool stores_channels(const BatchNormArgs& a) { return blockIdx.x % static_cast<unsigned>(a.p.pieces) == 0; }

template <auto kernel, class Shared>
cudaError_t launch_held(const BatchNormArgs& a, cudaStream_t stream) {
  static_assert(sizeof(Shared) % 16 == 0 && sizeof(Shared) <= kHeldTold);
  const LaunchShape shape{grid_of(a.p.items), a.p.threads, static_cast<int>(sizeof(Shared)) + a.p.held,
                          static_cast<int>(a.p.pieces), false};
  return launch_block<kernel>(a, shape, stream);
}

}  // namespace
}  // namespace normswap
