// Kimi Delta Attention as a recurrence over the rows of a sequence. Definition: kernels/kda/naive.py. Legend: decode.cpp.
#pragma once
#include "rows.h"

namespace {

struct Kda {
  Place place;
  double eps, qk_eps, out_eps, lower_bound;  // lower_bound 0: softplus gate
  int64_t heads, dim, taps, index;           // index: among the KDA layers
  Matrix joint, f_up, gate_up, out;          // gate_up without panels: the gate is full rank
  const float *conv, *bias, *rate;           // [taps + 1, 3C], [C], [C]
  float *state, *past;                       // by slot: [H, K, K], [taps, 3C]
};

// N vectors of columns of one head's state: S := diag(alpha) S, delta = beta (v - k^T S), S += k delta^T, o = q^T S.
template <int N>
void columns(int64_t dim, float* S, const float* q, const float* k, const float* v, const float* alpha, float beta,
             float overlap, float* o) {
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

// A token's part in the recurrence, from its inputs of the convolution, decays and betas: outputs [C]; y [3C] is scratch.
void advance(const Kda& op, const float* qkv, const float* alpha, const float* beta, float* state, float* past, float* y,
             float* out) {
  const int64_t C = op.heads * op.dim;
  convolve(op, 3 * C, qkv, past, y);
  for (int64_t h = 0; h < op.heads; h++) {
    float *q = y + h * op.dim, *k = q + C;
    for (float* each : {q, k}) {
      const float scale = 1.0f / std::sqrt(dot(each, each, op.dim) + float(op.qk_eps));
      map(op.dim, each, [=](int64_t i, auto get) { return get(each + i) * scale; });
    }
    head(op.dim, state + h * op.dim * op.dim, q, k, k + C, alpha + h * op.dim, beta[h], out + h * op.dim);
  }
}

// What a layer keeps of drafted tokens (Step.kept): the states of their sequences before the first of them, then what
// `advance` takes of every token.
struct Kept {
  const int64_t C, state, past, row;
  float* at;
  float* const rows;

  Kept(const Kda& op, const Step& step)
      : C(op.heads * op.dim), state(C * op.dim), past(op.taps * 3 * C), row(4 * C + op.heads),
        at(step.kept + op.index * step.kept_step), rows(at + step.drafted * (state + past)) {}

  float* of(int64_t draft) const { return rows + draft * row; }
  void save(int64_t sequence, const float* S, const float* taps) const {
    memcpy(at + sequence * (state + past), S, state * sizeof(float));
    memcpy(at + sequence * (state + past) + state, taps, past * sizeof(float));
  }
  void restore(int64_t sequence, float* S, float* taps) const {
    memcpy(S, at + sequence * (state + past), state * sizeof(float));
    memcpy(taps, at + sequence * (state + past) + state, past * sizeof(float));
  }
};

// Only the first `count` tokens of the drafted sequence that begins at `row` have been: its state goes back and takes them
// again, without the products around them.
void rewind(const Kda& op, const Step& step, int64_t row, int64_t count, float* y, float* out) {
  const Kept kept(op, step);
  float *state = op.state + step.slots[row] * kept.state, *past = op.past + step.slots[row] * kept.past;
  kept.restore(step.saves[row], state, past);
  for (int64_t r = row; r < row + count; r++) {
    const float* token = kept.of(step.drafts[r]);
    advance(op, token, token + 3 * kept.C, token + 4 * kept.C, state, past, y, out);
  }
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
  float* beta = rows.arena.take(op.heads);
  for (int64_t r = 0; r < count; r++) {
    const float *qkv = w + r * wide, *raw = qkv + wide - op.heads, bound = op.lower_bound;
    float *alpha = f + r * C, *out = o + r * C;
    float *state = op.state + rows.slot(r) * C * op.dim, *past = op.past + rows.slot(r) * op.taps * 3 * C;
    map(C, alpha, [&](int64_t i, auto get) {
      const vec g = get(alpha + i) + get(op.bias + i), rate = get(op.rate + i);
      return exp(bound != 0 ? bound * sigmoid(g * rate) : -rate * softplus(g));
    });
    for (int64_t h = 0; h < op.heads; h++) beta[h] = 1.0f / (1.0f + std::exp(-raw[h]));
    if (rows.step.kept && rows.step.drafts[rows.who[r]] >= 0) {
      const Kept kept(op, rows.step);
      const int64_t begins = rows.step.saves[rows.who[r]];
      if (begins >= 0) kept.save(begins, state, past);
      float* token = kept.of(rows.step.drafts[rows.who[r]]);
      memcpy(token, qkv, 3 * C * sizeof(float));
      memcpy(token + 3 * C, alpha, C * sizeof(float));
      memcpy(token + 4 * C, beta, op.heads * sizeof(float));
    }
    advance(op, qkv, alpha, beta, state, past, y, out);
    for (int64_t h = 0; h < op.heads; h++) {
      float* oh = out + h * op.dim;
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

}  // namespace
