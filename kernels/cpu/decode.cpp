// Tokens through the decoder for inference, on a CPU in float32: a list of operations over rows, one row a token.
//
// A step of a small model is a few hundred small operations; sent one by one from Python, much of the time is not spent
// computing. Here a model is a `Program`, made once per set of weights (model/engine/cpu.py), and a step one call.
// The rows of one sequence stand in the order of its tokens; one row each is a decode step, many are a prompt. KDA takes them
// one after the other, its state in the cache, where a recurrence costs little beside the products around it. A row's bits
// depend on its sequence alone: not on other rows, and not on how many tokens a call reads. So threads take sequences, and a
// thread a few rows at a time through all layers.
//
// Memory: the sources of the residual stream (one, or with Attention Residuals one per block), the mix `h` that a sub-layer
// reads with Attention Residuals, and a scratch arena. KDA states and taps lie by slot, MLA latents in pages.
// Definitions: kernels/kda/naive.py, model/mixers.py, model/layers.py, model/decoder.py; the norms' weights are multiplied into the
// projections behind them, as model/engine/cpu.py explains.
//
// Legend: D hidden, H heads, K key and value head dim, C = H K, E experts, J chosen, F expert width, R latent rank.
#include "feed.h"
#include "kda.h"
#include "mla.h"

namespace {

struct Measure { int64_t source; double eps; };
struct Mix { int64_t sources; const float* query; };
struct Finish { int64_t from; double eps; const float* norm; };

enum Kind : int64_t { MEASURE, MIX, KDA, MLA, MLP, MOE, FINISH };
struct Operation { int64_t kind; const void* is; };
struct Program { int64_t hidden, sources, count; const Operation* operations; };

void run(const Measure& op, Rows& rows) {
  for (int64_t r = 0; r < rows.count; r++)
    rows.scale(op.source)[r] = inverse_length(rows.source(op.source) + r * rows.D, rows.D, op.eps);
}

void run(const Mix& op, Rows& rows) {
  std::vector<float> weights(op.sources);
  for (int64_t r = 0; r < rows.count; r++) {
    float largest = -INFINITY, total = 0, *h = rows.h + r * rows.D;
    for (int64_t s = 0; s < op.sources; s++) {
      weights[s] = dot(op.query, rows.source(s) + r * rows.D, rows.D) * rows.scale(s)[r];
      largest = std::max(largest, weights[s]);
    }
    for (float& weight : weights) total += weight = std::exp(weight - largest);
    std::fill(h, h + rows.D, 0.0f);
    for (int64_t s = 0; s < op.sources; s++) add_scaled(h, weights[s] / total, rows.source(s) + r * rows.D, rows.D);
  }
}

void run(const Finish& op, Rows& rows) {
  const float* x = op.from < 0 ? rows.h : rows.source(op.from);
  for (int64_t r = 0; r < rows.count; r++, x += rows.D) {
    if (!rows.wanted(r)) continue;
    const float scale = inverse_length(x, rows.D, op.eps);
    float* out = rows.step.out + rows.step.places[rows.who[r]] * rows.D;
    map(rows.D, out, [=](int64_t i, auto get) { return get(x + i) * scale * get(op.norm + i); });
  }
}

}  // namespace

extern "C" {

int64_t panel_width() { return PANEL; }

// Bytes of the structures, by Kind, then Step: program.py must agree.
int64_t structure_size(int64_t which) {
  const size_t sizes[] = {sizeof(Measure), sizeof(Mix), sizeof(Kda),    sizeof(Mla),
                          sizeof(Mlp),     sizeof(Moe), sizeof(Finish), sizeof(Step)};
  return sizes[which];
}

// y [rows, columns] = x w, or += ; f(x) of n numbers. For tests.
void product(int64_t rows, const float* x, int64_t step_x, const Matrix* w, float* y, int64_t step_y, int64_t add) {
  multiply(rows, x, step_x, *w, y, step_y, add);
}
void apply(int64_t which, int64_t n, const float* x, float* y) {
  map(n, y, [=](int64_t i, auto get) {
    const vec v = get(x + i);
    return which == 0 ? exp(v) : which == 1 ? sigmoid(v) : which == 2 ? softplus(v) : which == 3 ? log(v) : log_one_minus(v);
  });
}

// y [rows, columns] = x [rows, inner] w of rows first .. end - 1.
void logits(const Matrix* w, const float* x, float* y, int64_t first, int64_t end) {
  multiply(end - first, x + first * w->inner, w->inner, *w, y + first * w->columns, w->columns);
}

// Of a step with drafts: sequences first .. end - 1 of those that begin at the given rows have only had `counts` tokens.
void rewind(const Program* program, const Step* step, const int64_t* begin, const int64_t* counts, int64_t first,
            int64_t end) {
  static thread_local Arena scratch;
  for (int64_t i = 0; i < program->count; i++) {
    if (program->operations[i].kind != KDA) continue;
    const Kda& op = *static_cast<const Kda*>(program->operations[i].is);
    scratch.reset();
    float *y = scratch.take(3 * op.heads * op.dim), *out = scratch.take(op.heads * op.dim);
    for (int64_t s = first; s < end; s++) rewind(op, *step, begin[s], counts[s], y, out);
  }
}

// Rows first .. end - 1 of a step, whole sequences; at most `most` rows at a time.
void decode(const Program* program, const Step* step, int64_t most, int64_t first, int64_t end) {
  static thread_local Arena kept, scratch;
  const int64_t D = program->hidden;
  for (int64_t start = first; start < end; start += most) {
    const int64_t count = std::min(most, end - start);
    kept.reset();
    Rows rows{*step, scratch, D, count, std::vector<int64_t>(count), kept.take(program->sources * count * D),
              kept.take(program->sources * count), kept.take(count * D), program->sources, count};
    for (int64_t r = 0; r < count; r++) rows.who[r] = start + r;
    memcpy(rows.sources, step->x + start * D, count * D * sizeof(float));
    for (int64_t i = 0; i < program->count && rows.count; i++) {
      const Operation& each = program->operations[i];
      scratch.reset();
      switch (each.kind) {
        case MEASURE: run(*static_cast<const Measure*>(each.is), rows); break;
        case MIX: run(*static_cast<const Mix*>(each.is), rows); break;
        case KDA: run(*static_cast<const Kda*>(each.is), rows); break;
        case MLA: run(*static_cast<const Mla*>(each.is), rows); break;
        case MLP: run(*static_cast<const Mlp*>(each.is), rows); break;
        case MOE: run(*static_cast<const Moe*>(each.is), rows); break;
        case FINISH: run(*static_cast<const Finish*>(each.is), rows); break;
      }
    }
  }
}
}
