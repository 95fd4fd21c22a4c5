// Tokens through the decoder for inference, on a CPU in float32: a list of operations over rows, one row a token.
//
// A step of a small model is a few hundred small operations; sent one by one from Python, half of the time is not spent
// computing. Here a model is a `Program`, made once per set of weights (model/engine/compiled.py), and a step one call.
// The rows of one sequence stand in the order of its tokens; one row each is a decode step, many are a prompt. KDA takes them
// one after the other, its state in the cache, where a recurrence costs a hundredth of the products around it. A row's bits
// depend on its sequence alone: not on other rows, and not on how many tokens a call reads. So threads take sequences, and a
// thread a few rows at a time through all layers.
//
// Memory: the sources of the residual stream (one, or with Attention Residuals one per block), the mix `h` that a sub-layer
// reads with Attention Residuals, and a scratch arena. KDA states and taps lie by slot, MLA latents in pages.
// Definitions: kernels/kda/naive.py, model/mla.py, model/moe.py, model/attnres.py; the norms' weights are multiplied into the
// projections behind them, as model/engine/lean_weights.py explains.
//
// Legend: D hidden, H heads, K key and value head dim, C = H K, E experts, J chosen, F expert width, R latent rank.
#include "vector.h"
#include <memory>
#include <vector>

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
};

struct Measure { int64_t source; double eps; };
struct Mix { int64_t sources; const float* query; };
struct Finish { int64_t from; double eps; const float* norm; };

struct Kda {
  Place place;
  double eps, qk_eps, out_eps, lower_bound;  // lower_bound 0: softplus gate
  int64_t heads, dim, taps;
  Matrix joint, f_up, gate_up, out;          // gate_up without panels: the gate is full rank
  const float *conv, *bias, *rate;           // [taps + 1, 3C], [C], [C]
  float *state, *past;                       // by slot: [H, K, K], [taps, 3C]
};

struct Mla {
  Place place;
  double eps, query_eps, latent_eps;
  int64_t heads, rank, shared, nope, value, low, gated;  // low: rank of the query, 0 if it is full; nope 0: absorbed
  Matrix joint, store, query, k_up, v_up, out;           // k_up, v_up: one per head, one after the other
  const float* latent_norm;
  float* latents;                                        // [pages * page_size, R + shared]
};

struct Mlp {
  Place place;
  double eps;
  Matrix gate_up, down;
};

struct Moe {
  Place place;
  double eps, scaling;
  int64_t experts, choices, renormalize, index;
  const float *norm, *bias;
  Matrix joint, up, down, shared_down;  // up, down: one per expert, one after the other
};

enum Kind : int64_t { MEASURE, MIX, KDA, MLA, MLP, MOE, FINISH };
struct Operation { int64_t kind; const void* is; };
struct Program { int64_t hidden, sources, count; const Operation* operations; };

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
  const Program& program;
  const Step& step;
  Arena& arena;
  int64_t D, count;
  std::vector<int64_t> who;     // rows of the step
  float *sources, *scales, *h;  // [sources, most, D], [sources, most], [most, D]
  int64_t most;

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
        for (int64_t s = 0; s < program.sources; s++) {
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
    const float scale = inverse_length(x, rows.D, op.eps);
    if (!rows.wanted(r)) continue;
    map(rows.D, rows.step.out + rows.step.places[rows.who[r]] * rows.D, [=](int64_t i, auto get) { return get(x + i) * scale * get(op.norm + i); });
  }
}

// ---- Kimi Delta Attention -------------------------------------------------------------------------------------------

// N vectors of columns of one head's state: S := diag(alpha) S, delta = beta (v - k^T S), S += k delta^T, o = q^T S.
template <int N>
void columns(int64_t dim, float* S, const float* q, const float* k, const float* v, const float* alpha, float beta, float overlap, float* o) {
  vec seen[N] = {}, asked[N] = {};
  for (int64_t i = 0; i < dim; i++) {
    const vec a = all(alpha[i]), ki = all(k[i]), qi = all(q[i]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      const vec s = load(S + i * dim + n * WIDTH) * a;
      store(S + i * dim + n * WIDTH, s);
      seen[n] += ki * s;
      asked[n] += qi * s;
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) {
    seen[n] = (load(v + n * WIDTH) - seen[n]) * beta;
    store(o + n * WIDTH, asked[n] + overlap * seen[n]);
  }
  for (int64_t i = 0; i < dim; i++) {
    const vec ki = all(k[i]);
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) store(S + i * dim + n * WIDTH, load(S + i * dim + n * WIDTH) + ki * seen[n]);
  }
}

void head(int64_t dim, float* S, const float* q, const float* k, const float* v, const float* alpha, float beta, float* o) {
  const float overlap = dot(q, k, dim);
  int64_t c = 0;
  for (; c + 4 * WIDTH <= dim; c += 4 * WIDTH) columns<4>(dim, S + c, q, k, v + c, alpha, beta, overlap, o + c);
  for (; c + 2 * WIDTH <= dim; c += 2 * WIDTH) columns<2>(dim, S + c, q, k, v + c, alpha, beta, overlap, o + c);
  for (; c + WIDTH <= dim; c += WIDTH) columns<1>(dim, S + c, q, k, v + c, alpha, beta, overlap, o + c);
  for (; c < dim; c++) {
    float seen = 0, asked = 0;
    for (int64_t i = 0; i < dim; i++) {
      const float s = S[i * dim + c] *= alpha[i];
      seen += k[i] * s;
      asked += q[i] * s;
    }
    seen = (v[c] - seen) * beta;
    o[c] = asked + overlap * seen;
    for (int64_t i = 0; i < dim; i++) S[i * dim + c] += k[i] * seen;
  }
}

// The newest input through convolution and SiLU, y [n]; the past inputs move on.
void convolve(const Kda& op, int64_t n, const float* x, float* past, float* y) {
  map(n, y, [&](int64_t i, auto get) {
    vec s = get(x + i) * get(op.conv + op.taps * n + i);
    for (int64_t t = 0; t < op.taps; t++) s += get(past + t * n + i) * get(op.conv + t * n + i);
    return silu(s);
  });
  memmove(past, past + n, (op.taps - 1) * n * sizeof(float));
  memcpy(past + (op.taps - 1) * n, x, n * sizeof(float));
}

void run(const Kda& op, Rows& rows) {
  const int64_t C = op.heads * op.dim, wide = op.joint.columns, D = rows.D;
  int64_t count = rows.count;
  float* u = rows.arena.take(count * D);
  units(count, rows.in(op.place), D, D, op.eps, u);
  float* w = rows.arena.take(count * wide);  // q, k, v [3C], gate input [K], output gate or its input, beta [H]
  multiply(count, u, D, op.joint, w, wide);
  float *f = rows.arena.take(count * C), *gate = w + 3 * C + op.dim;
  int64_t gate_step = wide;
  multiply(count, w + 3 * C, wide, op.f_up, f, C);
  float* o = rows.arena.take(count * C);
  float* y = rows.arena.take(3 * C);
  if (op.gate_up.panels) {
    float* up = rows.arena.take(count * C);
    multiply(count, gate, wide, op.gate_up, up, C);
    gate = up, gate_step = C;
  }
  for (int64_t r = 0; r < count; r++) {
    const float *qkv = w + r * wide, *beta = qkv + wide - op.heads;
    float *alpha = f + r * C, *out = o + r * C, *state = op.state + rows.slot(r) * C * op.dim;
    convolve(op, 3 * C, qkv, op.past + rows.slot(r) * op.taps * 3 * C, y);
    const float bound = op.lower_bound;
    map(C, alpha, [&](int64_t i, auto get) {
      const vec g = get(alpha + i) + get(op.bias + i), rate = get(op.rate + i);
      return exp(bound != 0 ? bound * sigmoid(g * rate) : -rate * softplus(g));
    });
    for (int64_t h = 0; h < op.heads; h++) {
      float *q = y + h * op.dim, *k = q + C, *oh = out + h * op.dim;
      for (float* each : {q, k}) {
        const float scale = 1.0f / std::sqrt(dot(each, each, op.dim) + float(op.qk_eps));
        map(op.dim, each, [=](int64_t i, auto get) { return get(each + i) * scale; });
      }
      const float b = 1.0f / (1.0f + std::exp(-beta[h]));
      head(op.dim, state + h * op.dim * op.dim, q, k, k + C, alpha + h * op.dim, b, oh);
      const float scale = inverse_length(oh, op.dim, op.out_eps);
      const float* g = gate + r * gate_step + h * op.dim;
      map(op.dim, oh, [=](int64_t i, auto get) { return get(oh + i) * scale * sigmoid(get(g + i)); });
    }
  }
  if (op.place.last) {
    rows.keep_wanted(o, C);
    count = rows.count;
  }
  multiply(count, o, C, op.out, rows.source(op.place.into), D, !op.place.fresh);
}

// ---- Multi-head latent attention ------------------------------------------------------------------------------------

constexpr int64_t KEYS = 64;  // looked at together; borders depend on the position alone

constexpr int TOGETHER = WIDTH == 16 ? 4 : 2;  // heads that share what is loaded of a key

// p [B, keys] = <q of B heads, keys>, K keys at a time
template <int B, int K>
int64_t scores(const float* q, const float* const* keys, int64_t key, int64_t n, int64_t size, float (*p)[KEYS]) {
  for (; key + K <= n; key += K) {
    vec sums[B][K] = {};
    float rest[B][K] = {};
    int64_t i = 0;
    for (; i + WIDTH <= size; i += WIDTH) {
      vec part[B];
#pragma GCC unroll 4
      for (int b = 0; b < B; b++) part[b] = load(q + b * size + i);
#pragma GCC unroll 4
      for (int k = 0; k < K; k++) {
        const vec of_key = load(keys[key + k] + i);
#pragma GCC unroll 4
        for (int b = 0; b < B; b++) sums[b][k] += part[b] * of_key;
      }
    }
    for (; i < size; i++)
      for (int b = 0; b < B; b++)
        for (int k = 0; k < K; k++) rest[b][k] += q[b * size + i] * keys[key + k][i];
    for (int b = 0; b < B; b++)
      for (int k = 0; k < K; k++) p[b][key + k] = sum(sums[b][k]) + rest[b][k];
  }
  return key;
}

// out [B, R] = scale out + p keys[:, :R], columns `at` .. at + N vectors
template <int B, int N>
void mix_keys(const float (*p)[KEYS], const float* const* keys, int64_t n, int64_t at, const float* scale, float* out, int64_t R) {
  vec s[B][N];
#pragma GCC unroll 4
  for (int b = 0; b < B; b++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) s[b][j] = load(out + b * R + at + j * WIDTH) * scale[b];
  for (int64_t key = 0; key < n; key++) {
    vec part[N];
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) part[j] = load(keys[key] + at + j * WIDTH);
#pragma GCC unroll 4
    for (int b = 0; b < B; b++) {
      const vec weight = all(p[b][key]);
#pragma GCC unroll 4
      for (int j = 0; j < N; j++) s[b][j] += weight * part[j];
    }
  }
#pragma GCC unroll 4
  for (int b = 0; b < B; b++)
#pragma GCC unroll 4
    for (int j = 0; j < N; j++) store(out + b * R + at + j * WIDTH, s[b][j]);
}

// One tile of keys for B heads of one row: q [B, size], out [B, R] and the statistics of the softmax so far.
template <int B>
void attend_tile(const float* q, const float* const* keys, int64_t n, int64_t size, int64_t R, float* largest, float* total, float* out) {
  float p[B][KEYS], scale[B];
  scores<B, 1>(q, keys, scores<B, 4>(q, keys, 0, n, size, p), n, size, p);
  for (int b = 0; b < B; b++) {
    std::fill(p[b] + n, p[b] + KEYS, -INFINITY);
    float top = largest[b];
    for (int64_t k = 0; k < n; k++) top = std::max(top, p[b][k]);
    vec sums{};
    for (int64_t k = 0; k < KEYS; k += WIDTH) {
      const vec s = load(p[b] + k), e = s == all(-INFINITY) ? vec{} : exp(s - top);
      store(p[b] + k, e);
      sums += e;
    }
    scale[b] = std::exp(largest[b] - top);
    total[b] = total[b] * scale[b] + sum(sums);
    largest[b] = top;
  }
  int64_t c = 0;
  for (; c + 4 * WIDTH <= R; c += 4 * WIDTH) mix_keys<B, 4>(p, keys, n, c, scale, out, R);
  for (; c + WIDTH <= R; c += WIDTH) mix_keys<B, 1>(p, keys, n, c, scale, out, R);
  for (; c < R; c++)
    for (int b = 0; b < B; b++) {
      float s = out[b * R + c] * scale[b];
      for (int64_t k = 0; k < n; k++) s += p[b][k] * keys[k][c];
      out[b * R + c] = s;
    }
}

// out [n, H, R] = softmax(q latents^T) latents[:, :R] of n rows of one sequence that stand one after the other, the first at
// `position`; q [n, H, R + shared] with `step_q` numbers from row to row. One pass over the latents with a running maximum.
void attend(const Mla& op, int64_t n, int64_t position, const int64_t* pages, int64_t page_size, const float* q, int64_t step_q,
            float* out, float* state) {
  const int64_t size = op.rank + op.shared, heads = op.heads;
  float *largest = state, *total = state + n * heads;
  std::fill(out, out + n * heads * op.rank, 0.0f);
  std::fill(largest, largest + n * heads, -INFINITY);
  std::fill(total, total + n * heads, 0.0f);
  const float* keys[KEYS];
  for (int64_t start = 0; start < position + n; start += KEYS) {
    for (int64_t at = start; at < std::min(start + KEYS, position + n); at++)
      keys[at - start] = op.latents + (pages[at / page_size] * page_size + at % page_size) * size;
    for (int64_t row = std::max<int64_t>(0, start - position); row < n; row++) {
      const int64_t seen = std::min(KEYS, position + row + 1 - start);
      int64_t h = 0;
      const auto each = [&](auto attend_some, int64_t count) {
        for (; h + count <= heads; h += count) {
          const int64_t i = row * heads + h;
          attend_some(q + row * step_q + h * size, keys, seen, size, op.rank, largest + i, total + i, out + i * op.rank);
        }
      };
      each(attend_tile<TOGETHER>, TOGETHER);
      each(attend_tile<1>, 1);
    }
  }
  for (int64_t i = 0; i < n * heads; i++) {
    const float scale = 1.0f / total[i];
    float* mixed = out + i * op.rank;
    map(op.rank, mixed, [=](int64_t k, auto get) { return get(mixed + k) * scale; });
  }
}

Matrix one_of(const Matrix& many, int64_t index) {
  const int64_t padded = (many.columns + PANEL - 1) / PANEL * PANEL;
  return {many.panels + index * padded * many.inner, many.inner, many.columns};
}

// Queries over latents, [count, H, R + shared] with `step` numbers from row to row.
const float* queries(const Mla& op, Rows& rows, const float* w, int64_t wide, int64_t* step) {
  const int64_t count = rows.count, size = op.rank + op.shared;
  const float* q = w;
  *step = wide;
  if (op.low) {
    float* low = rows.arena.take(count * op.low);
    units(count, w, wide, op.low, op.query_eps, low);
    float* full = rows.arena.take(count * op.query.columns);
    multiply(count, low, op.low, op.query, full, op.query.columns);
    q = full, *step = op.query.columns;
  }
  if (!op.nope) return q;
  const int64_t dim = op.nope + op.shared;
  float* absorbed = rows.arena.take(count * op.heads * size);
  for (int64_t h = 0; h < op.heads; h++) {
    multiply(count, q + h * dim, *step, one_of(op.k_up, h), absorbed + h * size, op.heads * size);
    for (int64_t r = 0; r < count; r++)
      memcpy(absorbed + (r * op.heads + h) * size + op.rank, q + r * *step + h * dim + op.nope, op.shared * sizeof(float));
  }
  *step = op.heads * size;
  return absorbed;
}

// Normed latents and shared key parts of all rows, [count, R + shared] with `wide` numbers from row to row, to the pages.
void append(const Mla& op, const Rows& rows, const float* latent, int64_t wide) {
  const int64_t size = op.rank + op.shared, page_size = rows.step.page_size;
  for (int64_t r = 0; r < rows.count; r++, latent += wide) {
    const int64_t at = rows.position(r), page = rows.step.pages[rows.slot(r) * rows.step.page_step + at / page_size];
    const float scale = inverse_length(latent, op.rank, op.latent_eps);
    float* kept = op.latents + (page * page_size + at % page_size) * size;
    map(op.rank, kept, [=](int64_t i, auto get) { return get(latent + i) * scale * get(op.latent_norm + i); });
    memcpy(kept + op.rank, latent + op.rank, op.shared * sizeof(float));
  }
}

void run(const Mla& op, Rows& rows) {
  const int64_t D = rows.D, wide = op.joint.columns, size = op.rank + op.shared;
  float* u = rows.arena.take(rows.count * D);
  if (op.place.last) {
    float* latents = rows.arena.take(rows.count * size);
    units(rows.count, rows.in(op.place), D, D, op.eps, u);
    multiply(rows.count, u, D, op.store, latents, size);
    append(op, rows, latents, size);
    rows.keep_wanted();
  }
  const int64_t count = rows.count;
  units(count, rows.in(op.place), D, D, op.eps, u);
  float* w = rows.arena.take(count * wide);  // query, latent and shared key part, output gate
  multiply(count, u, D, op.joint, w, wide);
  int64_t query_step;
  const float* query = queries(op, rows, w, wide, &query_step);
  const int64_t first_latent = wide - size - (op.gated ? op.heads * op.value : 0);
  if (!op.place.last) append(op, rows, w + first_latent, wide);
  float *mixed = rows.arena.take(count * op.heads * op.rank), *state = rows.arena.take(2 * count * op.heads);
  for (int64_t r = 0, n; r < count; r += n) {
    const int64_t slot = rows.slot(r), at = rows.position(r);
    for (n = 1; r + n < count && rows.slot(r + n) == slot && rows.position(r + n) == at + n;) n++;
    attend(op, n, at, rows.step.pages + slot * rows.step.page_step, rows.step.page_size, query + r * query_step, query_step,
           mixed + r * op.heads * op.rank, state);
  }
  const float* y = mixed;
  if (op.v_up.panels) {
    const int64_t V = op.heads * op.value;
    float* values = rows.arena.take(count * V);
    for (int64_t h = 0; h < op.heads; h++)
      multiply(count, mixed + h * op.rank, op.heads * op.rank, one_of(op.v_up, h), values + h * op.value, V);
    if (op.gated)
      for (int64_t r = 0; r < count; r++) {
        const float* gate = w + r * wide + first_latent + size;
        float* row = values + r * V;
        map(V, row, [=](int64_t i, auto get) { return get(row + i) * sigmoid(get(gate + i)); });
      }
    y = values;
  }
  multiply(count, y, op.out.inner, op.out, rows.source(op.place.into), D, !op.place.fresh);
}

// ---- feed-forward ---------------------------------------------------------------------------------------------------

// silu(gate) up of rows (gate, up), each `half` wide, packed to [rows, half]; times weight[row] if there are weights
void swiglu(int64_t rows, const float* x, int64_t step, int64_t half, const float* weights, float* y) {
  for (int64_t r = 0; r < rows; r++, x += step, y += half) {
    const float weight = weights ? weights[r] : 1.0f;
    map(half, y, [=](int64_t i, auto get) { return silu(get(x + i)) * get(x + half + i) * weight; });
  }
}

void run(const Mlp& op, Rows& rows) {
  const int64_t D = rows.D, wide = op.gate_up.columns;
  float *u = rows.arena.take(rows.count * D), *w = rows.arena.take(rows.count * wide), *act = rows.arena.take(rows.count * wide / 2);
  units(rows.count, rows.in(op.place), D, D, op.eps, u);
  multiply(rows.count, u, D, op.gate_up, w, wide);
  swiglu(rows.count, w, wide, wide / 2, nullptr, act);
  multiply(rows.count, act, wide / 2, op.down, rows.source(op.place.into), D, !op.place.fresh);
}

// The J experts with the largest score + bias (of equals the first), and their scores, normalised and scaled.
void route(const Moe& op, const float* logits, float* score, int64_t* ids, float* weights) {
  map(op.experts, score, [=](int64_t i, auto get) { return sigmoid(get(logits + i)); });
  float total = 0;
  for (int64_t j = 0; j < op.choices; j++) {
    int64_t best = -1;
    for (int64_t e = 0; e < op.experts; e++) {
      if (std::find(ids, ids + j, e) != ids + j) continue;
      if (best < 0 || score[e] + op.bias[e] > score[best] + op.bias[best]) best = e;
    }
    ids[j] = best;
    total += weights[j] = score[best];
  }
  const float scale = float(op.scaling) / (op.renormalize ? total + 1e-20f : 1.0f);
  for (int64_t j = 0; j < op.choices; j++) weights[j] *= scale;
}

void run(const Moe& op, Rows& rows) {
  const int64_t D = rows.D, J = op.choices, count = rows.count, wide = op.joint.columns, F = op.down.inner;
  const float* in = rows.in(op.place);
  float *x = rows.arena.take(count * D), *w = rows.arena.take(count * wide), *score = rows.arena.take(op.experts);
  for (int64_t r = 0; r < count; r++) {
    const float *row = in + r * D, scale = inverse_length(row, D, op.eps);
    map(D, x + r * D, [=](int64_t i, auto get) { return get(row + i) * scale * get(op.norm + i); });
  }
  multiply(count, x, D, op.joint, w, wide);  // router, then gate and up of the shared experts
  std::vector<int64_t> ids(count * J);
  std::vector<float> weights(count * J);
  for (int64_t r = 0; r < count; r++) route(op, w + r * wide, score, &ids[r * J], &weights[r * J]);
  if (rows.step.chosen)
    for (int64_t r = 0; r < count; r++)
      std::copy_n(&ids[r * J], J, rows.step.chosen + op.index * rows.step.chosen_step + rows.who[r] * J);

  std::vector<int64_t> start(op.experts + 1), members(count * J);
  for (int64_t id : ids) start[id + 1]++;
  for (int64_t e = 0; e < op.experts; e++) start[e + 1] += start[e];
  std::vector<int64_t> next(start.begin(), start.end() - 1);
  for (int64_t i = 0; i < count * J; i++) members[next[ids[i]]++] = i;

  float* into = rows.source(op.place.into);
  if (op.place.fresh) std::fill(into, into + count * D, 0.0f);
  float *mine = rows.arena.take(count * D), *h = rows.arena.take(count * 2 * F), *act = rows.arena.take(count * F), *y = rows.arena.take(count * D);
  std::vector<float> share(count);
  for (int64_t e = 0; e < op.experts; e++) {
    const int64_t n = start[e + 1] - start[e], *who = members.data() + start[e];
    if (!n) continue;
    for (int64_t i = 0; i < n; i++) {
      memcpy(mine + i * D, x + who[i] / J * D, D * sizeof(float));
      share[i] = weights[who[i]];
    }
    multiply(n, mine, D, one_of(op.up, e), h, 2 * F);
    swiglu(n, h, 2 * F, F, share.data(), act);
    multiply(n, act, F, one_of(op.down, e), y, D);
    for (int64_t i = 0; i < n; i++) add_scaled(into + who[i] / J * D, 1.0f, y + i * D, D);
  }
  if (op.shared_down.panels) {
    const int64_t S = op.shared_down.inner;
    float* shared = rows.arena.take(count * S);
    swiglu(count, w + op.experts, wide, S, nullptr, shared);
    multiply(count, shared, S, op.shared_down, into, D, true);
  }
}

}  // namespace

extern "C" {

int64_t panel_width() { return PANEL; }

// Bytes of the structures, by Kind, then Step: program.py must agree.
int64_t structure_size(int64_t which) {
  const size_t sizes[] = {sizeof(Measure), sizeof(Mix), sizeof(Kda), sizeof(Mla), sizeof(Mlp), sizeof(Moe), sizeof(Finish), sizeof(Step)};
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

// Rows first .. end - 1 of a step, whole sequences; at most `most` rows at a time.
void decode(const Program* program, const Step* step, int64_t most, int64_t first, int64_t end) {
  static thread_local Arena kept, scratch;
  const int64_t D = program->hidden;
  for (int64_t start = first; start < end; start += most) {
    const int64_t count = std::min(most, end - start);
    kept.reset();
    Rows rows{*program, *step, scratch, D, count, std::vector<int64_t>(count), kept.take(program->sources * count * D),
              kept.take(program->sources * count), kept.take(count * D), count};
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
