// What operations work on: the rows of a step on their way through the layers, and where things lie. See decode.cpp.
#pragma once
#include "vector.h"
#include <memory>

namespace {

struct Place {  // where a sub-layer reads (source, or -1: the mix) and adds; fresh: it is the first to write there;
  int64_t from, into, fresh, last;  // last: no later token needs more of the rows than their results
};

struct Step {
  const int64_t* slots;      // [rows]
  const int64_t* positions;  // [rows]: tokens before it in its sequence
  const int64_t* places;     // [rows]: row of `out`, or -1 if nobody asks for its result
  const int64_t* pages;      // [slot, page_step]: page numbers
  int64_t page_step, page_size;
  const float* x;            // [rows, D]: embeddings
  float* out;                // [.., D]: after the final norm
  int64_t* chosen;           // [MoE layers, rows, J] expert ids, or null
  int64_t chosen_step;       // numbers from one MoE layer to the next
  // Of tokens that may turn out not to be (drafts): see Kept in kda.h. Null where there are none.
  const int64_t* drafts;     // [rows]: number of a row among those of drafted sequences, or -1
  const int64_t* saves;      // [rows]: number of the drafted sequence that begins there, or -1
  float* kept;               // [KDA layers, kept_step]
  int64_t kept_step, drafted;  // drafted: sequences
};

class Arena {  // memory that lives until the next `reset`; a thread keeps its own for life
  std::vector<std::unique_ptr<float[]>> blocks;
  size_t size = 0, used = 0, wanted = 0;

 public:
  void reset() {
    if (blocks.size() != 1) {
      blocks.clear();
      size = wanted + wanted / 4 + 1024;
      blocks.emplace_back(new float[size]);
    }
    used = wanted = 0;
  }
  float* take(int64_t numbers) {
    const size_t n = (numbers + 15) / 16 * 16;
    wanted += n;
    if (used + n > size) {
      blocks.emplace_back(new float[n]);
      return blocks.back().get();
    }
    used += n;
    return blocks[0].get() + used - n;
  }
};

struct Rows {
  const Step& step;
  Arena& arena;
  int64_t D, count;
  std::vector<int64_t> who;     // rows of the step
  float *sources, *scales, *h;  // [number, most, D], [number, most], [most, D]
  int64_t number, most;

  float* source(int64_t index) const { return sources + index * most * D; }
  float* scale(int64_t index) const { return scales + index * most; }
  const float* in(const Place& p) const { return p.from < 0 ? h : source(p.from); }
  int64_t slot(int64_t row) const { return step.slots[who[row]]; }
  int64_t position(int64_t row) const { return step.positions[who[row]]; }
  bool wanted(int64_t row) const { return step.places[who[row]] >= 0; }

  // Go on with the rows whose results somebody asks for; `more` [count, n] is another tensor to be cut with them.
  void keep_wanted(float* more = nullptr, int64_t n = 0) {
    int64_t kept = 0;
    for (int64_t r = 0; r < count; r++) {
      if (!wanted(r)) continue;
      if (r != kept) {
        for (int64_t s = 0; s < number; s++) {
          memcpy(source(s) + kept * D, source(s) + r * D, D * sizeof(float));
          scale(s)[kept] = scale(s)[r];
        }
        memcpy(h + kept * D, h + r * D, D * sizeof(float));
        if (more) memcpy(more + kept * n, more + r * n, n * sizeof(float));
        who[kept] = who[r];
      }
      kept++;
    }
    count = kept;
  }
};

float inverse_length(const float* x, int64_t n, double eps) { return 1.0f / std::sqrt(dot(x, x, n) + float(n * eps)); }

// x / sqrt(sum x^2 + n eps) of every row
void units(int64_t rows, const float* x, int64_t step_x, int64_t n, double eps, float* y) {
  for (int64_t r = 0; r < rows; r++, x += step_x, y += n) {
    const float scale = inverse_length(x, n, eps);
    map(n, y, [=](int64_t i, auto get) { return get(x + i) * scale; });
  }
}

}  // namespace
