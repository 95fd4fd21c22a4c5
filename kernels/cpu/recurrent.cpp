// Kimi Delta Attention over packed documents with its gradient, token by token, on a CPU in float32.
//
// A chunked form trades arithmetic for matrix products. On a CPU the recurrence needs less of both: a head's state of K x V
// numbers stays in the cache, each token passes over it once, and nothing of size T x C or T x K x V is ever written.
//
// Forward, by columns of the state S [K, V], with q scaled and both normalised:
//     S := diag(alpha) S,  delta = beta (v - S^T k),  S += k delta^T,  o = S^T q
// What a token adds is left open until the next one passes over the state anyway. Kept for the backward: the delta of every
// token, and the state before every TIME-th.
//
// Backward, by rows of the transposed state [V, K], so that sums over V run in vectors: from a kept state the decayed states
// of TIME tokens are made again (additions alone, since every delta is known), then, last token first, with D the gradient of
// the state after the token and U its decayed state before:
//     D += do q^T,  ddelta = D k,  D_ = D - beta ddelta k^T,  D := D_ diag(alpha)
//     dq = U^T do + k (delta . do),  dk = D^T delta - U^T (beta ddelta),  dv = beta ddelta
//     dg = sum_v D_ U,  db = (1 - beta) (ddelta . delta)
// Sums run in the order of the tokens and rows of one document and head: its bits do not depend on anything beside it, and
// not on the number of threads.
//
// Definition: kernels/kda/naive.py. Legend: T tokens, N documents, H query heads, G value heads, K key dim, V value dim.
#include "vector.h"

namespace {

constexpr int64_t TIME = 32;          // tokens between kept states
constexpr int64_t HISTORY = 1 << 16;  // numbers of decayed states at a time: half of a small second-level cache
constexpr int64_t ROWS = 4;           // rows of the transposed state that share what is loaded
// Columns of the state that go through tokens together, or half of them where there are no more. They lie together, too:
// rows of the whole state at a power of two from each other would push each other out of the cache.
constexpr int64_t BLOCK = 4 * WIDTH;
constexpr float L2_EPS = 1e-6f;

struct Recurrence {
  int64_t documents, query_heads, heads, keys, values;
  int64_t q_step, k_step, v_step, f_step, b_step;  // numbers from one token to the next
  double lower_bound;                     // 0: softplus gate
  const int64_t *offsets, *states_begin;  // [N + 1] tokens, [N + 1] kept states
  const float *q, *k, *v, *f, *b;         // [T, H, K] twice, [T, G, V], [T, G, K], [T, G]
  const float *rate, *bias;               // [G], exp(A_log); [G, K]
  const float* initial;                   // [N, G, K, V] or null
  float *o, *final;                       // [T, G, V], [N, G, K, V] or null
  float *states, *delta;                  // [states, G, K, V], [T, G, V]; null where nobody asks for a gradient
  const float *d_o, *d_final;             // like o and final
  float *dq, *dk, *dv, *df, *db;          // [T, G, K] twice, then like v, f, b
  float *drate, *dbias, *dinitial;        // [N, G] of A_log, [N, G, K], like initial
};

int64_t whole(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

// What TIME tokens of one head bring, in rows filled up with zeros to whole vectors.
struct Tokens {
  const Recurrence& of;
  const int64_t K, V, head, keys, block, values;
  Workspace q, k, alpha, g, v;
  float beta[TIME], q_scale[TIME], k_scale[TIME], overlap[TIME];

  Tokens(const Recurrence& of, int64_t head)
      : of(of), K(of.keys), V(of.values), head(head), keys(whole(K, WIDTH)), block(V <= 2 * WIDTH ? 2 * WIDTH : BLOCK),
        values(whole(V, block)), q(TIME * keys), k(q), alpha(q), g(q), v(TIME * values) {}

  // Of a tensor [T, G, n].
  int64_t at(int64_t token, int64_t n) const { return (token * of.heads + head) * n; }

  template <bool BOUNDED>
  void read(int64_t first, int64_t count) {
    const int64_t shared = head / (of.heads / of.query_heads);
    const float rate = of.rate[head], bound = of.lower_bound, scale = 1.0f / std::sqrt(float(K));
    for (int64_t t = 0; t < count; t++) {
      const int64_t token = first + t;
      q_scale[t] = normalise(of.q + token * of.q_step + shared * K, scale, q.data() + t * keys);
      k_scale[t] = normalise(of.k + token * of.k_step + shared * K, 1.0f, k.data() + t * keys);
      const float *f = of.f + token * of.f_step + head * K, *bias = of.bias + head * K;
      float* log = g.data() + t * keys;
      map(K, log, [=](int64_t i, auto get) {
        const vec x = get(f + i) + get(bias + i);
        return BOUNDED ? bound * sigmoid(x * rate) : -rate * softplus(x);
      });
      map(K, alpha.data() + t * keys, [=](int64_t i, auto get) { return exp(get(log + i)); });
      memcpy(v.data() + t * values, of.v + token * of.v_step + head * V, V * sizeof(float));
      beta[t] = 1.0f / (1.0f + std::exp(-of.b[token * of.b_step + head]));
      overlap[t] = dot(q.data() + t * keys, k.data() + t * keys, K);
    }
  }

  float normalise(const float* x, float scale, float* y) const {
    scale /= std::sqrt(dot(x, x, K) + L2_EPS);
    map(K, y, [=](int64_t i, auto get) { return get(x + i) * scale; });
    return scale;
  }

  // Gradient of a raw query or key from that of y = x scale, where x is divided by its length: at dx.
  void denormalise(const float* y, float scale, float unit, const float* dy, float* dx) const {
    const float along = dot(y, dy, K) / (unit * unit);
    map(K, dx, [=](int64_t i, auto get) { return scale * (get(dy + i) - get(y + i) * along); });
  }
};

// Columns c .. c + N WIDTH - 1, [K, N WIDTH], through `count` tokens; v becomes delta.
template <int N>
void columns(Tokens& x, int64_t count, int64_t c, float* S, float* o) {
  vec open[N] = {};
  const float* before = x.k.data();  // times nothing at first
  for (int64_t t = 0; t < count; t++) {
    const float *q = x.q.data() + t * x.keys, *k = x.k.data() + t * x.keys, *alpha = x.alpha.data() + t * x.keys;
    vec seen[N] = {}, asked[N] = {};
    for (int64_t i = 0; i < x.K; i++) {
      const vec a = all(alpha[i]), ki = all(k[i]), qi = all(q[i]), last = all(before[i]);
      float* row = S + i * N * WIDTH;
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) {
        const vec s = (load(row + n * WIDTH) + last * open[n]) * a;
        store(row + n * WIDTH, s);
        seen[n] += ki * s;
        asked[n] += qi * s;
      }
    }
    float *v = x.v.data() + t * x.values + c, *out = o + t * x.values + c;
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      open[n] = (load(v + n * WIDTH) - seen[n]) * x.beta[t];
      store(v + n * WIDTH, open[n]);
      store(out + n * WIDTH, asked[n] + x.overlap[t] * open[n]);
    }
    before = k;
  }
  for (int64_t i = 0; i < x.K; i++) {
    float* row = S + i * N * WIDTH;
    for (int n = 0; n < N; n++) store(row + n * WIDTH, load(row + n * WIDTH) + before[i] * open[n]);
  }
}

void copy_rows(int64_t rows, int64_t n, const float* from, int64_t from_step, float* to, int64_t to_step) {
  for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_step, from + i * from_step, n * sizeof(float));
}

template <bool BOUNDED>
void forward(const Recurrence& of, int64_t document, int64_t head) {
  Tokens x(of, head);
  const int64_t K = x.K, V = x.V, begin = of.offsets[document], end = of.offsets[document + 1];
  const int64_t own = (document * of.heads + head) * K * V;
  Workspace S(K * x.values), o(TIME * x.values);
  // The state [K, V] lies in blocks of columns.
  auto each_block = [&](auto copy) {
    for (int64_t c = 0; c < V; c += x.block) copy(c, std::min(x.block, V - c), &S[c * K]);
  };
  auto write = [&](float* to) {
    each_block([&](int64_t c, int64_t n, float* block) { copy_rows(K, n, block, x.block, to + c, V); });
  };
  if (of.initial)
    each_block([&](int64_t c, int64_t n, float* block) { copy_rows(K, n, of.initial + own + c, V, block, x.block); });
  for (int64_t first = begin, kept = of.states_begin[document]; first < end; first += TIME, kept++) {
    const int64_t count = std::min(TIME, end - first);
    x.read<BOUNDED>(first, count);
    if (of.states) write(of.states + (kept * of.heads + head) * K * V);
    each_block([&](int64_t c, int64_t, float* block) {
      x.block == BLOCK ? columns<4>(x, count, c, block, o.data()) : columns<2>(x, count, c, block, o.data());
    });
    const int64_t step = of.heads * V;
    copy_rows(count, V, o.data(), x.values, of.o + x.at(first, V), step);
    if (of.delta) copy_rows(count, V, x.v.data(), x.values, of.delta + x.at(first, V), step);
  }
  if (of.final) write(of.final + own);
}

// Decayed states of `count` tokens, rows first .. first + rows - 1 of the transposed state: U [count, rows, keys].
void decayed(const Tokens& x, int64_t count, const float* state, const float* delta, int64_t first, int64_t rows, float* S,
             float* U) {
  const int64_t n = x.keys;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t i = 0; i < x.K; i++) S[r * n + i] = first + r < x.V ? state[i * x.V + first + r] : 0.0f;
  for (int64_t t = 0; t < count; t++) {
    const float *k = x.k.data() + t * n, *alpha = x.alpha.data() + t * n, *d = delta + t * x.values + first;
    // A row after the other: what a token writes lies together.
    for (int64_t r = 0; r < rows; r++, U += n) {
      const vec dr = all(d[r]);
      for (int64_t i = 0; i < n; i += WIDTH) {
        const vec u = load(S + r * n + i) * load(alpha + i);
        store(U + i, u);
        store(S + r * n + i, u + load(k + i) * dr);
      }
    }
  }
}

// Rows of D and U through one token: D becomes the gradient of the state before it; dq, dk, dg are added to. N: vectors of a
// row where they are few, which then stay in registers; else 0.
template <int N>
void rows_back(const Tokens& x, int64_t t, int64_t rows, const float* d_o, const float* delta, const float* U, float* D,
               float* ddelta, float* dq, float* dk, float* dg) {
  const int64_t n = N ? N * WIDTH : x.keys;
  const float *q = x.q.data() + t * n, *k = x.k.data() + t * n, *alpha = x.alpha.data() + t * n;
  constexpr int M = N ? N : 1;
  vec qs[M], ks[M], as[M], to_q[M], to_k[M], to_g[M];
  if (N)
    for (int i = 0; i < M; i++) {
      qs[i] = load(q + i * WIDTH);
      ks[i] = load(k + i * WIDTH);
      as[i] = load(alpha + i * WIDTH);
      to_q[i] = load(dq + i * WIDTH);
      to_k[i] = load(dk + i * WIDTH);
      to_g[i] = load(dg + i * WIDTH);
    }
  for (int64_t left = rows; left > 0; left -= ROWS) {
    vec met[ROWS] = {}, kept[ROWS][M];
    for (int64_t i = 0; i < (N ? N : n / WIDTH); i++) {
      const vec qi = N ? qs[i] : load(q + i * WIDTH), ki = N ? ks[i] : load(k + i * WIDTH);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        const vec d = load(D + r * n + i * WIDTH) + qi * d_o[r];
        if (N) kept[r][i] = d;
        else store(D + r * n + i * WIDTH, d);
        met[r] += ki * d;
      }
    }
    float back[ROWS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) ddelta[r] = sum(met[r]), back[r] = -x.beta[t] * ddelta[r];
    for (int64_t i = 0; i < (N ? N : n / WIDTH); i++) {
      const int64_t at = i * WIDTH;
      const vec ki = N ? ks[i] : load(k + at), a = N ? as[i] : load(alpha + at);
      vec q_sum = N ? to_q[i] : load(dq + at), k_sum = N ? to_k[i] : load(dk + at), g_sum = N ? to_g[i] : load(dg + at);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r++) {
        vec d = N ? kept[r][i] : load(D + r * n + at);
        const vec u = load(U + r * n + at);
        q_sum += u * d_o[r];
        k_sum += d * delta[r] + u * back[r];
        d += ki * back[r];
        g_sum += d * u;
        store(D + r * n + at, d * a);
      }
      if (N) {
        to_q[i] = q_sum;
        to_k[i] = k_sum;
        to_g[i] = g_sum;
      } else {
        store(dq + at, q_sum);
        store(dk + at, k_sum);
        store(dg + at, g_sum);
      }
    }
    d_o += ROWS;
    delta += ROWS;
    ddelta += ROWS;
    U += ROWS * n;
    D += ROWS * n;
  }
  if (N)
    for (int i = 0; i < M; i++) {
      store(dq + i * WIDTH, to_q[i]);
      store(dk + i * WIDTH, to_k[i]);
      store(dg + i * WIDTH, to_g[i]);
    }
}

// From a gradient of log decays to those of their input and parameters: A_log's and the bias' are added to, a number a channel.
template <bool BOUNDED>
void gate_back(const Tokens& x, int64_t token, const float* g, const float* dg, float* df, float* rate_sum, float* bias_sum) {
  const float *f = x.of.f + token * x.of.f_step + x.head * x.K, *bias = x.of.bias + x.head * x.K;
  const float rate = x.of.rate[x.head], bound = x.of.lower_bound;
  map(x.K, df, [=](int64_t i, auto get) {
    const vec of_g = get(dg + i), log = get(g + i), y = get(f + i) + get(bias + i);
    // From the value: where the sigmoid saturates the difference is an exact zero.
    const vec of_f = BOUNDED ? log * (1.0f - log / bound) * of_g * rate : sigmoid(y) * of_g * -rate;
    store(rate_sum + i, load(rate_sum + i) + (BOUNDED ? of_f * y : of_g * log));
    store(bias_sum + i, load(bias_sum + i) + of_f);
    return of_f;
  });
}

template <bool BOUNDED>
void backward(const Recurrence& of, int64_t document, int64_t head) {
  Tokens x(of, head);
  const int64_t K = x.K, V = x.V, n = x.keys, begin = of.offsets[document], end = of.offsets[document + 1];
  const int64_t own = document * of.heads + head, step = of.heads * V;
  const int64_t block = std::min(x.values, std::max(ROWS, HISTORY / (TIME * n) / ROWS * ROWS));
  Workspace D(x.values * n), U(TIME * block * n), S(block * n), d_o(TIME * x.values), delta(d_o), ddelta(d_o);
  Workspace dq(TIME * n), dk(dq), dg(dq), rate_sum(n), bias_sum(n);
  if (of.d_final)
    for (int64_t i = 0; i < K; i++)
      for (int64_t v = 0; v < V; v++) D[v * n + i] = of.d_final[(own * K + i) * V + v];
  for (int64_t chunk = (end - begin + TIME - 1) / TIME; chunk--;) {
    const int64_t first = begin + chunk * TIME, count = std::min(TIME, end - first);
    x.read<BOUNDED>(first, count);
    copy_rows(count, V, of.d_o + x.at(first, V), step, d_o.data(), x.values);
    copy_rows(count, V, of.delta + x.at(first, V), step, delta.data(), x.values);
    for (auto* each : {&dq, &dk, &dg}) std::fill(each->begin(), each->end(), 0.0f);
    const float* state = of.states + ((of.states_begin[document] + chunk) * of.heads + head) * K * V;
    for (int64_t row = 0; row < whole(V, ROWS); row += block) {
      const int64_t rows = std::min(block, whole(V, ROWS) - row);
      decayed(x, count, state, delta.data(), row, rows, S.data(), U.data());
      auto* through = n == 2 * WIDTH ? rows_back<2> : rows_back<0>;
      for (int64_t t = count; t--;) {
        const int64_t at = t * x.values + row;
        through(x, t, rows, &d_o[at], &delta[at], &U[t * rows * n], &D[row * n], &ddelta[at], &dq[t * n], &dk[t * n],
                &dg[t * n]);
      }
    }
    for (int64_t t = count; t--;) {
      const float *go = &d_o[t * x.values], *de = &delta[t * x.values], *dd = &ddelta[t * x.values], beta = x.beta[t];
      add_scaled(&dq[t * n], dot(go, de, V), &x.k[t * n], K);
      x.denormalise(&x.q[t * n], x.q_scale[t], 1.0f / std::sqrt(float(K)), &dq[t * n], of.dq + x.at(first + t, K));
      x.denormalise(&x.k[t * n], x.k_scale[t], 1.0f, &dk[t * n], of.dk + x.at(first + t, K));
      map(V, of.dv + x.at(first + t, V), [=](int64_t i, auto get) { return beta * get(dd + i); });
      of.db[x.at(first + t, 1)] = (1.0f - beta) * dot(dd, de, V);
      gate_back<BOUNDED>(x, first + t, &x.g[t * n], &dg[t * n], of.df + x.at(first + t, K), rate_sum.data(), bias_sum.data());
    }
  }
  float total = 0;
  for (int64_t i = 0; i < K; i++) total += rate_sum[i];
  of.drate[own] = total;
  memcpy(of.dbias + own * K, bias_sum.data(), K * sizeof(float));
  if (of.dinitial)
    for (int64_t i = 0; i < K; i++)
      for (int64_t v = 0; v < V; v++) of.dinitial[(own * K + i) * V + v] = D[v * n + i];
}

// ---- The short convolution in front of it, and SiLU: kernels/kda/naive.py, `short_conv`. C channels, W taps.

struct Convolution {
  int64_t channels, width, x_step;
  const int64_t *blocks, *begins, *ends;  // [blocks + 1] first rows; first row and end of each block's document
  const int64_t* documents;               // [blocks]
  const float *x, *weight;                // [T, C], [W, C]
  const float* taps;                      // [N, W - 1, C] or null
  float* y;                               // [T, C]
  const float* dy;                        // like y
  float *dx, *dweight, *dtaps;            // like y, [blocks, W, C], like taps
};

// Channels that go through rows together: what is between stays in the first-level cache.
constexpr int64_t CHANNELS = 4 * WIDTH;

struct Window {
  const Convolution& of;
  const int64_t block, first, end, begin, stop, before;  // rows of the block, rows of its document, W - 1
  std::vector<float> none;

  Window(const Convolution& of, int64_t block)
      : of(of), block(block), first(of.blocks[block]), end(of.blocks[block + 1]), begin(of.begins[block]),
        stop(of.ends[block]), before(of.width - 1), none(of.channels) {}

  // Inputs of a row, which may stand before the document.
  const float* input(int64_t row) const {
    if (row >= begin) return of.x + row * of.x_step;
    return of.taps ? of.taps + (of.documents[block] * before + row - begin + before) * of.channels : none.data();
  }
  // Before SiLU, channels c .. c + n - 1; then f(i, its vector, load).
  template <class F>
  void sums(int64_t row, int64_t c, int64_t n, float* out, F f) const {
    const float* w = of.weight + c;
    if (of.width == 4) {  // the usual one, unrolled
      const float *x0 = input(row - 3) + c, *x1 = input(row - 2) + c, *x2 = input(row - 1) + c, *x3 = input(row) + c;
      const int64_t C = of.channels;
      map(n, out, [&](int64_t i, auto get) {
        const vec s = get(x0 + i) * get(w + i) + get(x1 + i) * get(w + C + i);
        return f(i, s + get(x2 + i) * get(w + 2 * C + i) + get(x3 + i) * get(w + 3 * C + i), get);
      });
      return;
    }
    map(n, out, [&](int64_t i, auto get) {
      vec s{};
      for (int64_t t = 0; t < of.width; t++) s += get(input(row - before + t) + c + i) * get(w + t * of.channels + i);
      return f(i, s, get);
    });
  }
};

void forward(const Convolution& of, int64_t block) {
  const Window at(of, block);
  for (int64_t row = at.first; row < at.end; row++)
    at.sums(row, 0, of.channels, of.y + row * of.channels, [](int64_t, vec s, auto) { return silu(s); });
}

void backward(const Convolution& of, int64_t block) {
  const Window at(of, block);
  const int64_t C = of.channels, W = of.width, last = std::min(at.stop, at.end + at.before);
  Workspace dz((last - at.first) * CHANNELS);
  for (int64_t c = 0; c < C; c += CHANNELS) {
    const int64_t n = std::min(CHANNELS, C - c);
    // Of the rows behind the block, too, as far as they read rows of the block.
    for (int64_t row = at.first; row < last; row++) {
      const float* dy = of.dy + row * C + c;
      at.sums(row, c, n, &dz[(row - at.first) * CHANNELS], [=](int64_t i, vec s, auto get) {
        const vec g = sigmoid(s);
        return get(dy + i) * g * (1.0f + s * (1.0f - g));
      });
    }
    auto gradient = [&](int64_t row, float* out) {  // of an input: the rows that read it
      memset(out, 0, n * sizeof(float));
      for (int64_t t = 0; t < W; t++) {
        const int64_t reader = row + at.before - t;
        if (reader < at.first || reader >= last) continue;
        const float *w = of.weight + t * C + c, *d = &dz[(reader - at.first) * CHANNELS];
        map(n, out, [=](int64_t i, auto get) { return get(out + i) + get(w + i) * get(d + i); });
      }
    };
    for (int64_t row = at.first; row < at.end; row++) gradient(row, of.dx + row * C + c);
    if (of.dtaps && at.first == at.begin)
      for (int64_t t = 0; t < at.before; t++)
        gradient(at.begin - at.before + t, of.dtaps + (of.documents[block] * at.before + t) * C + c);
    for (int64_t t = 0; t < W; t++) {
      float* dw = of.dweight + (block * W + t) * C + c;
      memset(dw, 0, n * sizeof(float));
      for (int64_t row = at.first; row < at.end; row++) {
        const float *x = at.input(row - at.before + t) + c, *d = &dz[(row - at.first) * CHANNELS];
        map(n, dw, [=](int64_t i, auto get) { return get(dw + i) + get(x + i) * get(d + i); });
      }
    }
  }
}

}  // namespace

extern "C" {

// Every document and head is a sequence of as many places as it has tokens, one after the other, heads of a document
// together; those that begin at places first .. end - 1.
void recurrent(const Recurrence* of, int64_t back, int64_t first, int64_t end) {
  for (int64_t document = 0; document < of->documents; document++)
    for (int64_t head = 0; head < of->heads; head++) {
      const int64_t length = of->offsets[document + 1] - of->offsets[document];
      const int64_t place = of->offsets[document] * of->heads + head * length;
      if (place < first || place >= end) continue;
      auto* run = of->lower_bound ? back ? backward<true> : forward<true> : back ? backward<false> : forward<false>;
      run(*of, document, head);
    }
}

// Blocks of rows first .. end - 1.
void convolution(const Convolution* of, int64_t back, int64_t first, int64_t end) {
  for (int64_t block = first; block < end; block++) {
    if (back) backward(*of, block);
    else forward(*of, block);
  }
}
}
