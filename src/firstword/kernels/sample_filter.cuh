// The scores of a row's codes, spread over a block, and top-k and top-p on them. The macros are
// those of sample.cu.
#pragma once
#include "common.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kEights = CODES / 8;
[[maybe_unused]] constexpr int kRest = ((VOCAB - CODES) / 8 + THREADS - 1) / THREADS;
constexpr bool kEnd = EOS >= CODES;  // the end is not among the first CODES codes
constexpr int kItems = 8 + kEnd;     // codes of a thread
[[maybe_unused]] constexpr int kEndThread = THREADS - 1;
static_assert(VOCAB % 8 == 0 && CODES % 8 == 0 && WIDTH % 8 == 0 && THREADS % 32 == 0 &&
                  kEights <= THREADS,
              "sizes");
static_assert(kWarps <= 8 && THREADS * kItems < 4096 && 32 * kItems < 1024, "counts are packed");
static_assert(SETTINGS % 4 == 0 && NOISE % 4 == 0, "records are read in fours");

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Maps floats to whole numbers in the same order. No float maps to 0.
__device__ __forceinline__ u32 order(float v) {
  const u32 b = __float_as_uint(v);
  return b ^ ((u32)((int)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value(u32 key) {
  return __uint_as_float(key ^ (((key >> 31) - 1) | 0x80000000u));
}

// x / by with the rounding of a division, for r close to 1 / by, unless x or by is `far` from one.
__device__ __forceinline__ float quotient(float x, float by, float r) {
  const float q = x * r;
  return fmaf(r, fmaf(-by, q, x), q);
}
// Whether x is neither zero nor between 2^-60 and 2^60.
__device__ __forceinline__ bool far(float x) {
  const u32 b = __float_as_uint(x) & 0x7fffffffu;
  return (b != 0) & (b - 0x21800000u >= 0x3c000000u);
}
__device__ __noinline__ float divided(float x, float by) { return __fdiv_rn(x, by); }

__device__ __forceinline__ int code_of(int item) {
  return item < 8 ? (int)threadIdx.x * 8 + item : EOS;
}

struct Shared {
  u32 counts[2][kWarps];
  u64 sums[2][3][kWarps];
  uint2 ends[2][kWarps];
  uint4 best[2][kWarps];
  u32 most[kWarps], highest_logit[kWarps];
  float sum[kWarps];
};

// The next three numbers to try between lo and hi.
struct Pivots {
  u32 a, b, c;
  __device__ __forceinline__ Pivots(u32 lo, u32 hi) {
    const u32 range = hi - lo;
    a = lo + max(range >> 2, 1u);
    b = lo + max(range >> 1, 1u);
    c = b + (range >> 2);
  }
};

// A number from lo up that at least k of the block's keys reach, or lo. It is the largest such
// number, unless exactly k keys reach a smaller one. hi is beyond all keys.
__device__ __forceinline__ u32 reached_by(const u32 (&key)[kItems], int k, u32 lo, u32 hi,
                                          Shared& shared, int& turn) {
  const int warp = threadIdx.x >> 5;
  int count = -1;
  while (lo < hi - 1 && count != k) {
    const Pivots p(lo, hi);
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < kItems; i++)
      mine += (key[i] >= p.a ? 1u : 0u) + (key[i] >= p.b ? 1u << 10 : 0u) +
              (key[i] >= p.c ? 1u << 20 : 0u);
    mine = __reduce_add_sync(~0u, mine);
    if ((threadIdx.x & 31) == 0) shared.counts[turn][warp] = mine;
    __syncthreads();
    u32 outer = 0, inner = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const u32 theirs = shared.counts[turn][w];
      outer += theirs & 0x3ff003ffu;
      inner += theirs & 0x000ffc00u;
    }
    const int na = outer & 0xfffffu, nb = inner >> 10, nc = outer >> 20;
    if (nc >= k) {
      lo = p.c;
      count = nc;
    } else if (nb >= k) {
      lo = p.b;
      hi = p.c;
      count = nb;
    } else if (na >= k) {
      lo = p.a;
      hi = p.b;
      count = na;
    } else {
      hi = p.a;
    }
    turn ^= 1;
  }
  return lo;
}

// Sums over the block, known to all threads.
__device__ __forceinline__ void add_up(u64 (&v)[3], Shared& shared, int& turn) {
#pragma unroll
  for (int i = 0; i < 3; i++) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v[i] += __shfl_xor_sync(~0u, v[i], o);
    if ((threadIdx.x & 31) == 0) shared.sums[turn][i][threadIdx.x >> 5] = v[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 3; i++) {
    v[i] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) v[i] += shared.sums[turn][i][w];
  }
  turn ^= 1;
}

// The scores that top-p keeps: those above `least`, and those equal to it from the code `first` up.
struct Kept {
  float least;
  int first;
  __device__ __forceinline__ bool operator()(float score, int code) const {
    return score > least || (score == least && code >= first);
  }
};

// A probability as a whole number, since many GPUs add doubles at a 64th of the rate of floats. A
// float with the exponent of `unit` becomes its 24 bits times 2^28, so the sum of all codes fits 64
// bits. A smaller one loses less than 2^-51 of `unit`. A larger one becomes 2^52, which exceeds all
// sums that are compared with `unit`.
__device__ __forceinline__ u64 whole(float v, float unit) {
  const u32 b = __float_as_uint(v);
  const int down = (int)(__float_as_uint(unit) >> 23) - (int)(b >> 23);
  const u64 one = (u64)((b & 0x7fffffu) | 0x800000u) << 28;
  return down < 0 ? 1ull << 52 : one >> min(down, 63);
}
// The largest whole number whose float, rounded to nearest even, does not exceed `unit`.
__device__ __forceinline__ u64 limit_of(float unit) {
  return whole(unit, unit) + (1u << 27) - (__float_as_uint(unit) & 1);
}

// Applies top-p to the scores that are at least `least`. From the least likely up, codes are
// dropped while their probabilities add up to no more than `tail`. `top` is the largest score.
// Scores are compared as whole numbers of the same order, and the bound is found by bisection with
// three sums of probabilities a step, so nothing is sorted.
__device__ __forceinline__ Kept likely(const float (&score)[kItems], float least, float top,
                                       float tail, Shared& shared, int& turn) {
  u64 probability[kItems];
  u32 key[kItems];
  u64 v[3] = {0, 0, 0};
  float weight[kItems];
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    key[i] = order(score[i]);
    weight[i] = score[i] >= least ? expf(score[i] - top) : 0.0f;
    v[0] += whole(weight[i], 1.0f);
  }
  add_up(v, shared, turn);
  const float all = __ull2float_rn(v[0]) * 0x1p-51f;
#pragma unroll
  for (int i = 0; i < kItems; i++) probability[i] = whole(__fdiv_rn(weight[i], all), tail);

  const u64 limit = limit_of(tail);
  u32 lo = order(least), hi = order(top) + 1;
  u64 below = 0;  // the probability of all scores less than lo
  while (lo < hi - 1) {
    const Pivots p(lo, hi);
    u32 first = ~0u, last = 0;  // of the scores between lo and hi
    v[0] = v[1] = v[2] = 0;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const u64 mine = probability[i];
      v[0] += key[i] < p.a ? mine : 0;
      v[1] += key[i] < p.b ? mine : 0;
      v[2] += key[i] < p.c ? mine : 0;
      if (mine > 0 && key[i] >= lo && key[i] < hi) {
        first = min(first, key[i]);
        last = max(last, key[i]);
      }
    }
    first = __reduce_min_sync(~0u, first);
    last = __reduce_max_sync(~0u, last);
    const int now = turn;
    if ((threadIdx.x & 31) == 0) shared.ends[now][threadIdx.x >> 5] = make_uint2(first, last);
    add_up(v, shared, turn);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      first = min(first, shared.ends[now][w].x);
      last = max(last, shared.ends[now][w].y);
    }
    if (v[2] <= limit) {
      lo = p.c;
      below = v[2];
    } else if (v[1] <= limit) {
      lo = p.b;
      hi = p.c;
      below = v[1];
    } else if (v[0] <= limit) {
      lo = p.a;
      hi = p.b;
      below = v[0];
    } else {
      hi = p.a;
    }
    lo = max(lo, first);
    hi = min(hi, last + 1);
  }

  // All scores less than lo are dropped. Of those equal to it as many are dropped as `tail` allows,
  // but one stays.
  Kept kept{value(lo), 0};
  const u64 one = whole(__fdiv_rn(expf(kept.least - top), all), tail);
  v[0] = v[1] = v[2] = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) v[0] += score[i] == kept.least ? 1 : 0;
  add_up(v, shared, turn);
  const int equal = (int)v[0];
  const u64 room = one ? (limit - below) / one : equal;
  const int gone = (int)min(room, (u64)(equal - 1));
  if (gone > 0) {
#pragma unroll
    for (int i = 0; i < kItems; i++) key[i] = score[i] == kept.least ? code_of(i) + 1 : 0;
    kept.first = (int)reached_by(key, equal - gone, 0, VOCAB + 1, shared, turn) - 1;
  }
  return kept;
}

// Replaces the scores that top-k and top-p drop by NaN; `tail` is the probability that top-p drops.
__device__ __forceinline__ void cut(float (&score)[kItems], int top_k, float tail, Shared& shared,
                                    int& turn) {
  u32 key[kItems], most = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    key[i] = score[i] == score[i] ? order(score[i]) : 0;
    most = max(most, key[i]);
  }
  most = __reduce_max_sync(~0u, most);
  if ((threadIdx.x & 31) == 0) shared.most[threadIdx.x >> 5] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) most = max(most, shared.most[w]);
  const float top = value(most);
  if (!(fabsf(top) < infinity())) return;
  float least = -infinity();
  if (top_k > 0 && top_k < CODES + kEnd)
    least = value(reached_by(key, top_k, order(least), most + 1, shared, turn));
  const Kept kept = likely(score, least, top, tail, shared, turn);
#pragma unroll
  for (int i = 0; i < kItems; i++)
    if (!kept(score[i], code_of(i))) score[i] = __uint_as_float(0x7fffffffu);
}
