// How the columns of a batch are cut and who works on them, for BatchNorm by the batch's own statistics: pure host code,
// called by the launcher and, through normswap_batch_norm_plan, by tests.
//
// The tensor is `samples` rows of channels * inner columns; `inner` neighbouring columns are a channel (inner is 1 in
// channels_last memory). A strip is some whole channels, `lanes` threads side by side on a row of it, a vector each; a
// channel of many columns is a strip alone, whose rows are a vector each, `line` of them in a sample. A piece is so many rows
// of a strip: its statistics, then those of a channel's pieces, unite in a fixed order. Where a block, or the blocks of a
// cluster, can have a whole strip in shared memory, a piece each, they may hold it, so that x and dy are read once; strips are
// narrower then. The shape, the element size and what a block of the GPU can hold decide all of this.
#pragma once

#include "plan/plan.h"

namespace normswap {

struct BatchNormSizes {
  int64_t samples, channels, inner;
  int itemsize;
};

// What decides besides whether strips are held.
struct BatchNormHolding {
  int tensors;    // that are read twice: x, and in the backward dy; 0 where they are read once
  bool clusters;  // of eight blocks
  int shared;     // bytes of shared memory a block can have
};

struct BatchNormPlan {
  int vec;              // columns of a vector: kBatchNormVec, or 1
  int lanes, side;      // vectors of a strip's row; rows that a block has side by side
  int threads;          // of a block
  int values;           // statistics a thread hands on: vec where a vector may be of several channels, else 1
  int width;            // columns of a row of a strip ...
  int last_width;       // ... and of the last strip's
  int group;            // channels of a strip; of the last one last_group
  int last_group;
  int across;           // statistics that the threads of a row hand on of a channel
  int log_run;          // lanes that unite those of a channel
  int64_t line;         // rows of a strip in a sample: more than 1 where rows are vectors of a channel
  int64_t strips, rows;  // rows of a strip
  int64_t piece_rows, pieces;  // pieces of a strip
  int64_t items;        // pieces in all
  int held;             // bytes of a block's vectors in shared memory; 0: the tensors are read twice
  bool pairs;           // two neighbouring threads' vectors lie at 16 bytes, if vectors are of 8
};

constexpr int kBatchNormThreads = 256;
constexpr int kBatchNormVec = 4;           // more would not leave room for what a column needs in registers
constexpr int64_t kStripOf = 256;          // bytes of a row, by choice ...
constexpr int kMostOfStrip = 128;          // ... and so many columns, at most, where each is a channel
constexpr int64_t kLineOf = 128;           // bytes of a channel in a sample from which on its vectors are rows
constexpr int64_t kLeastRows = 8;          // of a thread
constexpr int64_t kMostPieces = 396;       // of all strips, if these are not more: three for each of 132 multiprocessors
constexpr int kHeldVectors = 101 * 1024;   // bytes of a block's, at most: a multiprocessor of 228 KB has two such blocks
constexpr int kHeldTold = 12 * 1024;       // bytes for what such blocks and their threads tell each other
constexpr int64_t kHeldChannels = 16;      // of a strip that is held, at most
constexpr int64_t kLeastHeld = 4;          // rows of a thread
constexpr int64_t kHeldAtOnce = 264;       // blocks: two on each of 132 multiprocessors
// The memory has strips of narrow rows in many parts, which is slow. They are held if they have at most so many rows, a block
// at most so many bytes of them, or half as many in the backward, and all blocks run at once.
constexpr int64_t kHeldRows = 4096, kHeldNarrow = 128 * 1024;

inline int64_t divisor_of_both(int64_t a, int64_t b) { return b == 0 ? a : divisor_of_both(b, a % b); }

// Strips of whole channels, of about `bytes` a row; false where a channel is wider than a block.
inline bool cut_into_strips(const BatchNormSizes& s, int vec, int64_t bytes, BatchNormPlan* p) {
  const int64_t unit = s.inner / divisor_of_both(s.inner, vec);  // the fewest vectors that are whole channels
  if (unit > kBatchNormThreads) return false;
  const int64_t chosen = bytes / (vec * s.itemsize), lanes = chosen < kMostOfStrip ? chosen : kMostOfStrip;
  const int64_t all = s.channels * s.inner / vec, wanted = unit > lanes ? unit : lanes / unit * unit;
  p->vec = vec;
  p->lanes = static_cast<int>(wanted < all ? wanted : all);
  p->width = p->lanes * vec;
  p->line = 1;
  p->strips = ceil_div(all, p->lanes);
  p->last_width = static_cast<int>(s.channels * s.inner - (p->strips - 1) * p->width);
  p->group = static_cast<int>(p->width / s.inner);
  p->last_group = static_cast<int>(p->last_width / s.inner);
  p->values = s.inner % vec == 0 ? 1 : vec;
  p->across = static_cast<int>(s.inner * p->values / vec);
  return true;
}

// A strip a channel, its rows vectors.
inline void cut_lines(const BatchNormSizes& s, int vec, BatchNormPlan* p) {
  p->vec = p->width = p->last_width = vec;
  p->line = s.inner / vec;
  p->strips = s.channels;
  p->lanes = p->group = p->last_group = p->values = p->across = 1;
}

// Strips of about `bytes` a row, or of a channel, and a block's threads among them.
inline void cut_columns(const BatchNormSizes& s, int64_t bytes, BatchNormPlan* p) {
  const int vec = s.channels * s.inner % kBatchNormVec == 0 ? kBatchNormVec : 1;
  const bool lines = s.inner % vec == 0 && s.inner * s.itemsize >= kLineOf;
  if (lines || !cut_into_strips(s, vec, bytes, p)) cut_lines(s, s.inner % vec == 0 ? vec : 1, p);
  p->side = kBatchNormThreads / p->lanes;
  p->threads = static_cast<int>(ceil_div(p->lanes * p->side, 32) * 32);
  p->rows = s.samples * p->line;
  const int64_t entries = static_cast<int64_t>(p->across) * p->side;
  while (p->log_run < 5 && (1 << p->log_run) < entries && (p->group << (p->log_run + 1)) <= p->threads) ++p->log_run;
}

// Pieces of so many rows of a thread.
inline void cut_rows(int64_t of_thread, BatchNormPlan* p) {
  p->piece_rows = of_thread * p->side;
  p->pieces = ceil_div(p->rows, p->piece_rows);
  p->items = p->pieces * p->strips;
}

// Narrow strips, and their pieces for the blocks of a cluster; false where they do not hold them. Where clusters have as many
// blocks as they need and more can run at once, they have more.
inline bool hold_strips(const BatchNormSizes& s, const BatchNormHolding& by, BatchNormPlan* p) {
  cut_columns(s, kHeldChannels * s.itemsize, p);
  const int64_t room = by.shared - kHeldTold < kHeldVectors ? by.shared - kHeldTold : kHeldVectors;
  const int64_t row = static_cast<int64_t>(p->threads) * p->vec * s.itemsize * by.tensors;  // bytes, of a row a thread
  const int64_t all = ceil_div(p->rows, p->side), most = by.clusters ? kMaxCluster : 1;
  if (by.tensors == 0 || p->vec == 1 || room < row || ceil_div(all, room / row) > most) return false;
  const int64_t fewest = ceil_div(all, room / row), at_once = kHeldAtOnce / p->strips;
  const int64_t pieces = at_once < fewest ? fewest : at_once < most ? at_once : most, of_thread = ceil_div(all, pieces);
  cut_rows(of_thread > kLeastHeld ? of_thread : all < kLeastHeld ? all : kLeastHeld, p);
  p->held = static_cast<int>(p->piece_rows / p->side * row);
  p->pairs = p->line > 1 ? p->line % 2 == 0 : s.inner == 1 && p->lanes % 2 == 0 && s.channels % (2 * p->vec) == 0;
  const bool few = p->rows <= kHeldRows && p->held * by.tensors <= kHeldNarrow && p->items <= kHeldAtOnce;
  return p->line > 1 || p->width * s.itemsize >= kLineOf || few;
}

// Returns false where there are too many rows or columns.
inline bool make_batch_norm_plan(const BatchNormSizes& s, const BatchNormHolding& by, BatchNormPlan* plan) {
  BatchNormPlan p{};
  if (!hold_strips(s, by, &p)) {
    p = {};
    cut_columns(s, kStripOf, &p);
    const int64_t most = p.strips < kMostPieces ? kMostPieces / p.strips : 1;
    const int64_t of_thread = ceil_div(p.rows, p.side * most);
    cut_rows(of_thread > kLeastRows ? of_thread : kLeastRows, &p);
  }
  *plan = p;
  const int64_t between = (s.channels * s.inner - p.line * p.vec) * s.itemsize;  // bytes, of a channel's samples
  return p.rows < (int64_t{1} << 30) && p.items < (int64_t{1} << 31) && between < (int64_t{1} << 32);
}

// Floats of scratch memory, which strips that are held need none of: forward three a piece of a channel, backward two, and
// two a channel.
inline int64_t batch_norm_workspace(const BatchNormPlan& p, const BatchNormSizes& s) {
  return p.held > 0 ? 0 : s.channels * (3 * p.pieces + 2);
}

}  // namespace normswap
