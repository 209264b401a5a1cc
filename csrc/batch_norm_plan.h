// How the columns of a batch are cut and who works on them, for BatchNorm by the batch's own statistics: pure host code,
// called by the launcher and, through normswap_batch_norm_plan, by tests.
//
// The tensor is `samples` rows of channels * inner columns; `inner` neighbouring columns are a channel (inner is 1 in
// channels_last memory). A strip is some whole channels, `lanes` threads side by side on a row of it, a vector each; a
// channel wider than a block is a strip alone, of which a line is `parts` rows. A piece is so many rows of a strip: its
// statistics, then those of a channel's pieces, unite in a fixed order. Shape and element size alone decide all of this.
#pragma once

#include "row_plan.h"

namespace normswap {

struct BatchNormSizes {
  int64_t samples, channels, inner;
  int itemsize;
};

struct BatchNormPlan {
  int vec;              // columns of a vector: kBatchNormVec, or 1
  int lanes, side;      // vectors of a strip's row; rows that a block has side by side
  int threads;          // of a block
  int values;           // statistics a thread hands on: vec where a vector may be of several channels, else 1
  int width;            // columns of a row of a strip ...
  int last_width;       // ... and of the last strip's, or of the last part of a line
  int group;            // channels of a strip; of the last one last_group
  int last_group;
  int across;           // statistics that the threads of a row hand on of a channel
  int log_run;          // lanes that unite those of a channel
  int64_t parts;        // rows of a line: more than 1 in wide channels
  int64_t strips, rows;  // rows of a strip
  int64_t piece_rows, pieces;  // pieces of a strip
  int64_t items;        // pieces in all
};

constexpr int kBatchNormThreads = 256;
constexpr int kBatchNormVec = 4;           // more would not leave room for what a column needs in registers
constexpr int64_t kStripOf = 256;          // bytes of a row, by choice ...
constexpr int kMostOfStrip = 128;          // ... and so many columns, at most, where each is a channel
constexpr int64_t kBatchNormItems = 1584;  // pieces, about: twelve for each of 132 multiprocessors
constexpr int64_t kLeastRows = 8;          // of a thread

inline int64_t divisor_of_both(int64_t a, int64_t b) { return b == 0 ? a : divisor_of_both(b, a % b); }

// Strips of whole channels; false where a channel is wider than a block.
inline bool cut_into_strips(const BatchNormSizes& s, int vec, BatchNormPlan* p) {
  const int64_t unit = s.inner / divisor_of_both(s.inner, vec);  // the fewest vectors that are whole channels
  if (unit > kBatchNormThreads) return false;
  const int64_t chosen = kStripOf / (vec * s.itemsize), lanes = chosen < kMostOfStrip ? chosen : kMostOfStrip;
  const int64_t all = s.channels * s.inner / vec, wanted = unit > lanes ? unit : lanes / unit * unit;
  p->vec = vec;
  p->lanes = static_cast<int>(wanted < all ? wanted : all);
  p->width = p->lanes * vec;
  p->parts = 1;
  p->strips = ceil_div(all, p->lanes);
  p->last_width = static_cast<int>(s.channels * s.inner - (p->strips - 1) * p->width);
  p->group = static_cast<int>(p->width / s.inner);
  p->last_group = static_cast<int>(p->last_width / s.inner);
  p->values = s.inner % vec == 0 ? 1 : vec;
  p->across = static_cast<int>(s.inner * p->values / vec);
  return true;
}

// A strip a channel, each line in parts.
inline void cut_lines(const BatchNormSizes& s, int vec, BatchNormPlan* p) {
  const int64_t vectors = s.inner / vec, least = ceil_div(vectors, kBatchNormThreads);
  p->vec = vec;
  p->lanes = static_cast<int>(ceil_div(vectors, least));
  p->width = p->lanes * vec;
  p->parts = ceil_div(vectors, p->lanes);
  p->last_width = static_cast<int>(s.inner - (p->parts - 1) * p->width);
  p->strips = s.channels;
  p->group = p->last_group = p->values = 1;
  p->across = p->lanes;
}

// Returns false where there are too many rows or columns.
inline bool make_batch_norm_plan(const BatchNormSizes& s, BatchNormPlan* plan) {
  BatchNormPlan p{};
  const int vec = s.channels * s.inner % kBatchNormVec == 0 ? kBatchNormVec : 1;
  if (!cut_into_strips(s, vec, &p)) {
    const int within = s.inner % vec == 0 ? vec : 1;
    if (within == vec || !cut_into_strips(s, within, &p)) cut_lines(s, within, &p);
  }
  p.side = kBatchNormThreads / p.lanes;
  p.threads = static_cast<int>(ceil_div(p.lanes * p.side, 32) * 32);
  p.rows = s.samples * p.parts;
  const int64_t entries = static_cast<int64_t>(p.across) * p.side;
  while (p.log_run < 5 && (1 << p.log_run) < entries && (p.group << (p.log_run + 1)) <= p.threads) ++p.log_run;
  const int64_t vectors = s.samples * s.channels * s.inner / p.vec;
  const int64_t wanted = ceil_div(vectors, static_cast<int64_t>(p.lanes) * p.side * kBatchNormItems);
  p.piece_rows = (wanted < kLeastRows ? kLeastRows : wanted) * p.side;
  p.pieces = ceil_div(p.rows, p.piece_rows);
  p.items = p.pieces * p.strips;
  *plan = p;
  return p.rows < (int64_t{1} << 30) && p.items < (int64_t{1} << 31) && s.channels < (int64_t{1} << 30);
}

// Floats of scratch memory: forward three a piece of a channel, backward two, and two a channel.
inline int64_t batch_norm_workspace(const BatchNormPlan& p, const BatchNormSizes& s) {
  return s.channels * (3 * p.pieces + 2);
}

}  // namespace normswap
