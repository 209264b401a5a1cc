// A cluster that takes row after row.
#pragma once

#include "device/cluster.cuh"
#include "device/launch.h"
#include "row/row_apply.cuh"

namespace normswap {
namespace {

// Rows with one weight an element: with two, registers are so few that it is no faster.
template <class Policy, class T>
constexpr bool kTakesTurns = kWeights<Policy> == 1 && sizeof(T) == 2;

// A cluster takes row after row: its weights stay in registers, and the next row is on its way while the statistics of one
// are united. No warp waits for another but for its statistic, which every block of the cluster is sent.
template <class Policy, class T>
__global__ void __launch_bounds__(kWarpsInTurns * 32) row_in_turns(const RowArgs args) {
  if constexpr (kClusters) {
    using Stat = typename Policy::Stat;
    using TurnTile = ChunkTile<T, false>;
    __shared__ struct {
      alignas(16) Stat parts[2][kMaxHeld];  // by turns
      Inbox inbox[2];
    } shared;
    const unsigned blocks = args.blocks_a_row, rank = blockIdx.x % blocks;
    const unsigned bytes = static_cast<unsigned>(args.chunks) * sizeof(Stat);
    if (threadIdx.x < 32) {
      for (Inbox& inbox : shared.inbox) inbox.open(bytes);
    }
    cluster_arrive_with_inboxes();
    follow_predecessor();
    let_successor_start();
    const int chunk = rank * args.block_chunks + static_cast<int>(threadIdx.x / 32), lane = threadIdx.x % 32;
    const int64_t begin = chunk * int64_t{kChunk}, step = gridDim.x / blocks;
    const int len = static_cast<int>(max(int64_t{0}, min(args.n.cols - begin, int64_t{kChunk})));
    const T* x = static_cast<const T*>(args.n.x) + begin;
    const T* end = static_cast<const T*>(args.n.x) + args.n.rows * args.n.cols;
    int64_t rows[1] = {blockIdx.x / blocks};
    TurnTile tiles[1];
    tiles[0].load(x + rows[0] * args.n.cols, len, end);
    AffineAhead<Policy, T, TurnTile> affine;
    affine.load_ahead(args, begin, tiles[0]);
    cluster_wait();  // every block of the cluster runs
    for (int turn = 0; rows[0] < args.n.rows; ++turn) {
      Stat* parts = shared.parts[turn % 2];
      Inbox& inbox = shared.inbox[turn % 2];
      Stat mine[1];
      Policy::statistics(tiles, len == kChunk ? args.sizes.chunk : args.sizes.last_chunk, args, mine);
      if (chunk < args.chunks && lane < static_cast<int>(blocks)) send_to_block(parts + chunk, inbox, lane, mine[0]);
      TurnTile next;
      const int64_t after = rows[0] + step;
      next.load(x + after * args.n.cols, after < args.n.rows ? len : 0, end);
      // Who sends for the turn after the next has had all of the next, and so this warp has read its parts.
      inbox.barrier.wait(turn / 2 % 2);
      if (threadIdx.x == 0) inbox.barrier.arrive_expecting(bytes);
      const Stat stat = unite_chunks(parts, static_cast<int>(args.chunks), args.sizes);
      const RowValues values[1] = {Policy::template finish<T>(stat, args)};
      if (rank == 0 && threadIdx.x == 0) save_values<Policy>(args, rows[0], stat, values[0]);
      affine.forget();
      apply_tiles<Policy, T>(tiles, args, rows, begin, values, affine);
      tiles[0] = next;
      rows[0] = after;
    }
  }
}

}  // namespace
}  // namespace normswap
