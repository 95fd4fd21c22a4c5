// Multi-head latent attention over pages of latents, absorbed. Definition: model/mixers.py. Legend: decode.cpp.
#pragma once
#include "rows.h"

namespace {

struct Mla {
  Place place;
  double eps, query_eps, latent_eps;
  int64_t heads, rank, shared, nope, value, low, gated;  // low: rank of the query, 0 if it is full; nope 0: absorbed
  Matrix joint, store, query, k_up, v_up, out;           // k_up, v_up: one per head, one after the other
  const float* latent_norm;
  float* latents;                                        // [pages * page_size, R + shared]
};

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
void mix_keys(const float (*p)[KEYS], const float* const* keys, int64_t n, int64_t at, const float* scale, float* out,
              int64_t R) {
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
void attend_tile(const float* q, const float* const* keys, int64_t n, int64_t size, int64_t R, float* largest, float* total,
                 float* out) {
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

}  // namespace
