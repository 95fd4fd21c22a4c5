// Feed-forward: dense SwiGLU and mixture of experts. Definition: model/layers.py. Legend: decode.cpp.
#pragma once
#include "rows.h"

namespace {

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

// silu(gate) up of rows (gate, up), each `half` wide, packed to [rows, half]; times weight[row] if there are weights
void swiglu(int64_t rows, const float* x, int64_t step, int64_t half, const float* weights, float* y) {
  for (int64_t r = 0; r < rows; r++, x += step, y += half) {
    const float weight = weights ? weights[r] : 1.0f;
    map(half, y, [=](int64_t i, auto get) { return silu(get(x + i)) * get(x + half + i) * weight; });
  }
}

void run(const Mlp& op, Rows& rows) {
  const int64_t D = rows.D, wide = op.gate_up.columns;
  float *u = rows.arena.take(rows.count * D), *w = rows.arena.take(rows.count * wide);
  float* act = rows.arena.take(rows.count * wide / 2);
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
  float *mine = rows.arena.take(count * D), *h = rows.arena.take(count * 2 * F);
  float *act = rows.arena.take(count * F), *y = rows.arena.take(count * D);
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
