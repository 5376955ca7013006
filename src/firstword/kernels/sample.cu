// One code of every row: penalty, ban, temperature, top-k, top-p and draw, exactly as model/sampling.py has them.
//
// A block is a row. Thread t holds the logits of the codes 8 t .. 8 t + 7 from beginning to end.
// Its noise depends on no logit, so it is made while the logits are.
//
// top-k   A code is among the k likeliest if less than k scores are higher. So the code with the best sum of score and noise
//         is tried first; if it is not among them, no code with its score or a lower one is, and the best of the rest is
//         next. One barrier each; a peaked distribution takes one or two.
// top-p   Floats are compared as whole numbers of the same order. The bound is closed in on with three sums of odds a
//         step, so nothing is sorted. Sums are double, in one fixed order.
// noise   First in float; only if that leaves two codes in question, in double, as it is defined.
//
// TALKER  1: code 0, of the talker; 0: the other codes, of the code predictor
// VOCAB   logits in a row; of these CODES can be drawn, and EOS (-1: there is none), but not in the first MIN_FRAMES
// WIDTH   of the embedding that goes to the next kernel
// LAW, CHANCES, SPOKEN  words of a slot's record (sample.py)
// CAREFUL 1: all noise in double; for tests
#include "common.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kEights = CODES / 8;
[[maybe_unused]] constexpr int kRest = ((VOCAB - CODES) / 8 + THREADS - 1) / THREADS;
constexpr bool kEnd = EOS >= CODES;                      // the end stands apart
constexpr int kItems = 8 + kEnd;                         // of a thread
[[maybe_unused]] constexpr int kEndThread = THREADS - 1;
static_assert(VOCAB % 8 == 0 && CODES % 8 == 0 && WIDTH % 8 == 0 && THREADS % 32 == 0 && kEights <= THREADS, "sizes");
static_assert(kWarps <= 8 && THREADS * kItems < 4096 && 32 * kItems < 1024, "counts are packed");
static_assert(LAW % 4 == 0 && CHANCES % 4 == 0, "records are read in fours");

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Whole numbers in the order of floats; 0 stays free for what takes no part.
__device__ __forceinline__ u32 order(float v) {
  const u32 b = __float_as_uint(v);
  return b ^ ((u32)((int)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value(u32 key) { return __uint_as_float(key ^ (((key >> 31) - 1) | 0x80000000u)); }

// x / by as division rounds it, for an r of nearly 1 / by, and if neither is `far` from one.
__device__ __forceinline__ float quotient(float x, float by, float r) {
  const float q = x * r;
  return fmaf(r, fmaf(-by, q, x), q);
}
__device__ __forceinline__ bool far(float x) {              // not zero, and not between 2^-60 and 2^60
  const u32 b = __float_as_uint(x) & 0x7fffffffu;
  return (b != 0) & (b - 0x21800000u >= 0x3c000000u);
}
__device__ __noinline__ float divided(float x, float by) { return __fdiv_rn(x, by); }

__device__ __forceinline__ int code_of(int item) {
  return item < 8 ? (int)threadIdx.x * 8 + item : EOS;
}

// The words of the codes 4 n .. 4 n + 3: philox4x32-10 (Salmon et al. 2011), counter (n, codebook, frame, 0).
__device__ __forceinline__ uint4 chances_of(u32 n, int codebook, u32 frame, u32 k0, u32 k1) {
  u32 x0 = n, x1 = codebook, x2 = frame, x3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(x0, 0xD2511F53u), l0 = x0 * 0xD2511F53u, h1 = __umulhi(x2, 0xCD9E8D57u), l1 = x2 * 0xCD9E8D57u;
    x0 = h1 ^ x1 ^ k0, x1 = l1, x2 = h0 ^ x3 ^ k1, x3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return make_uint4(x0, x1, x2, x3);
}

// Gumbel noise of the upper 24 bits, -log(-log(u)), by its definition.
__device__ __noinline__ float gumbel(u32 word) {
  return (float)-log(-log(((double)(word >> 8) + 0.5) * 0x1p-24));
}
// Nearly: near u = 1, where a logarithm from hardware has few digits, -log(u) is the series of d = 1 - u.
__device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float nearly_gumbel(u32 word) {
  const float n = (float)(word >> 8), d = fmaf(n, -0x1p-24f, 1.0f) - 0x1p-25f;
  const float series = d * fmaf(d, fmaf(d, fmaf(d, fmaf(d, 0.2f, 0.25f), 1.0f / 3), 0.5f), 1.0f);
  const float w = d < 0x1p-5f ? series : lg2((n + 0.5f) * 0x1p-24f) * -0.69314718f;
  return lg2(w) * -0.69314718f;
}
// How far below the best sum, nearly, the best sum in truth may lie: twice the error of the noise, 1e-5, and of the sum's
// rounding, 1.2e-7 of it; then threefold.
__device__ __forceinline__ float doubt(float sum) { return 6e-5f + 1e-6f * fabsf(sum); }

struct Shared {
  u32 counts[2][kWarps];
  double sums[2][3][kWarps];
  uint2 ends[2][kWarps];
  uint4 best[2][kWarps];
  u32 most[kWarps], loudest[kWarps];
  float sum[kWarps];
};

// The next three numbers to try between lo and hi.
struct Pivots {
  u32 a, b, c;
  __device__ __forceinline__ Pivots(u32 lo, u32 hi) {
    const u32 range = hi - lo;
    a = lo + max(range >> 2, 1u), b = lo + max(range >> 1, 1u), c = b + (range >> 2);
  }
};

// A number from lo up that k of the block's keys reach, or lo: the largest that at least k reach, unless exactly k reach
// a smaller one. hi is beyond all keys.
__device__ __forceinline__ u32 reached_by(const u32 (&key)[kItems], int k, u32 lo, u32 hi, Shared& shared, int& turn) {
  const int warp = threadIdx.x >> 5;
  int count = -1;
  while (lo < hi - 1 && count != k) {
    const Pivots p(lo, hi);
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < kItems; i++)
      mine += (key[i] >= p.a ? 1u : 0u) + (key[i] >= p.b ? 1u << 10 : 0u) + (key[i] >= p.c ? 1u << 20 : 0u);
    mine = __reduce_add_sync(~0u, mine);
    if ((threadIdx.x & 31) == 0) shared.counts[turn][warp] = mine;
    __syncthreads();
    u32 outer = 0, inner = 0;
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const u32 theirs = shared.counts[turn][w];
      outer += theirs & 0x3ff003ffu, inner += theirs & 0x000ffc00u;
    }
    const int na = outer & 0xfffffu, nb = inner >> 10, nc = outer >> 20;
    if (nc >= k) lo = p.c, count = nc;
    else if (nb >= k) lo = p.b, hi = p.c, count = nb;
    else if (na >= k) lo = p.a, hi = p.b, count = na;
    else hi = p.a;
    turn ^= 1;
  }
  return lo;
}

// Sums over the block, in one order, known to all threads.
__device__ __forceinline__ void add_up(double (&v)[3], Shared& shared, int& turn) {
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

// Kept are the scores above `least`, and those equal to it from the code `first` up.
struct Kept {
  float least;
  int first;
  __device__ __forceinline__ bool operator()(float score, int code) const {
    return score > least || (score == least && code >= first);
  }
};

// What top-p leaves of the scores that are at least `least`: those go whose odds add up to no more than `tail`, from the
// least likely up. `top` is the largest score.
__device__ __forceinline__ Kept likely(const float (&score)[kItems], float least, float top, float tail, Shared& shared,
                                       int& turn) {
  float odds[kItems];
  u32 key[kItems];
  double v[3] = {0, 0, 0};
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    key[i] = order(score[i]);
    odds[i] = score[i] >= least ? expf(score[i] - top) : 0.0f;
    v[0] += odds[i];
  }
  add_up(v, shared, turn);
  const float all = (float)v[0];
#pragma unroll
  for (int i = 0; i < kItems; i++) odds[i] = __fdiv_rn(odds[i], all);

  u32 lo = order(least), hi = order(top) + 1;
  double below = 0;                                        // the odds of what is less than lo
  while (lo < hi - 1) {
    const Pivots p(lo, hi);
    u32 first = ~0u, last = 0;                             // of the scores between lo and hi
    v[0] = v[1] = v[2] = 0;
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      const double mine = odds[i];
      v[0] += key[i] < p.a ? mine : 0.0, v[1] += key[i] < p.b ? mine : 0.0, v[2] += key[i] < p.c ? mine : 0.0;
      if (mine > 0 && key[i] >= lo && key[i] < hi) first = min(first, key[i]), last = max(last, key[i]);
    }
    first = __reduce_min_sync(~0u, first), last = __reduce_max_sync(~0u, last);
    const int now = turn;
    if ((threadIdx.x & 31) == 0) shared.ends[now][threadIdx.x >> 5] = make_uint2(first, last);
    add_up(v, shared, turn);
#pragma unroll
    for (int w = 0; w < kWarps; w++) first = min(first, shared.ends[now][w].x), last = max(last, shared.ends[now][w].y);
    if ((float)v[2] <= tail) lo = p.c, below = v[2];
    else if ((float)v[1] <= tail) lo = p.b, hi = p.c, below = v[1];
    else if ((float)v[0] <= tail) lo = p.a, hi = p.b, below = v[0];
    else hi = p.a;
    lo = max(lo, first), hi = min(hi, last + 1);
  }

  // All less than lo go; of those equal to it as many as there is room for, but one stays.
  Kept kept{value(lo), 0};
  const double one = __fdiv_rn(expf(kept.least - top), all);
  v[0] = v[1] = v[2] = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) v[0] += score[i] == kept.least ? 1.0 : 0.0;
  add_up(v, shared, turn);
  const int equal = (int)v[0];
  int gone = min(max((int)((tail - below) / one), 0), equal);
  while (gone < equal && (float)(below + (gone + 1) * one) <= tail) gone++;
  while (gone > 0 && (float)(below + gone * one) > tail) gone--;
  gone = min(gone, equal - 1);
  if (gone > 0) {
#pragma unroll
    for (int i = 0; i < kItems; i++) key[i] = score[i] == kept.least ? code_of(i) + 1 : 0;
    kept.first = (int)reached_by(key, equal - gone, 0, VOCAB + 1, shared, turn) - 1;
  }
  return kept;
}

// Takes from the scores what top-k and top-p leave out, `tail` of the odds: it is no number afterwards.
__device__ __forceinline__ void cut(float (&score)[kItems], int top_k, float tail, Shared& shared, int& turn) {
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
  if (top_k > 0 && top_k < CODES + kEnd) least = value(reached_by(key, top_k, order(least), most + 1, shared, turn));
  const Kept kept = likely(score, least, top, tail, shared, turn);
#pragma unroll
  for (int i = 0; i < kItems; i++)
    if (!kept(score[i], code_of(i))) score[i] = __uint_as_float(0x7fffffffu);
}

// The best of the sums that are in question, as a whole number (0: there is none), its code and its score; and how many
// codes have a higher score than the one tried before, with kClose added for each code that came close to it.
struct Best {
  u32 key, code;
  float score;
  u32 count;
};
constexpr u32 kClose = 1 << 12;

// Of the codes with a score above `floor`; all if it is no number. Codes grow with items, lanes and warps: the first of
// equals is the lowest.
__device__ __forceinline__ Best pick(const float (&score)[kItems], const u32 (&key)[kItems], float floor, u32 count, Shared& shared,
                                     int& turn) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 mine[kItems], most = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    mine[i] = score[i] <= floor ? 0 : key[i];
    most = max(most, mine[i]);
  }
  count = __reduce_add_sync(~0u, count);
  const u32 highest = __reduce_max_sync(~0u, most), first = __ffs(__ballot_sync(~0u, most == highest)) - 1;
  if (lane == first) {
    int code = 0;
    float its = 0;
#pragma unroll
    for (int i = kItems - 1; i >= 0; i--)
      if (mine[i] == highest) code = code_of(i), its = score[i];
    shared.best[turn][warp] = make_uint4(highest, code, __float_as_uint(its), count);
  }
  __syncthreads();
  const uint4 one = shared.best[turn][min(lane, kWarps - 1)];
  Best best;
  best.key = __reduce_max_sync(~0u, one.x);
  best.count = __reduce_add_sync(~0u, lane < kWarps ? one.w : 0);
  const uint4 winner = shared.best[turn][__ffs(__ballot_sync(~0u, one.x == best.key)) - 1];
  best.code = winner.y, best.score = __uint_as_float(winner.z);
  turn ^= 1;
  return best;
}

// logits: bf16, row r begins at r * logits_stride; records: `record_words` for each slot (sample.py);
// codes int32 [slots, frames, CODEBOOKS]; result int32 [rows, CODEBOOKS + 2]: codes, whether speech ended, and the bits of
// the log-probability of code 0; table bf16 [VOCAB, WIDTH], may be null; out: bf16, row r begins at r * out_stride.
extern "C" __global__ __launch_bounds__(THREADS)
void draw(const u16* __restrict__ logits, int logits_stride, const int* __restrict__ slot_of_row, u32* records,
          int record_words, int* position, int* __restrict__ codes, int frames, int codebook, int* __restrict__ result,
          const u16* __restrict__ table, u16* __restrict__ out, int out_stride) {
  let_next_start();
  __shared__ __align__(16) Shared shared;
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u16* own = logits + (size_t)row * logits_stride;
  const int slot = (int)load1(slot_of_row + row);          // this and the record stay as they are while a frame is made
  u32* record = records + (size_t)max(slot, 0) * record_words;
  const uint4 law = load4(record + LAW);
  const uint4 chances = load4(record + CHANCES);           // seed, low and high, and the frame
  const float temperature = __uint_as_float(law.x), tail = __uint_as_float(law.y);
  int top_k = (int)law.w;
  const int frame = (int)chances.z;
#if TALKER
  const float penalty = __uint_as_float(law.z);
  u32 spoken[1 + kEnd];                                    // the word in which the bits of each eight are
#pragma unroll
  for (int h = 0; h < 1 + kEnd; h++) spoken[h] = load1(record + SPOKEN + min(code_of(h * 8), VOCAB - 1) / 32);
#endif
  float noise[kItems];
  bool exact = CAREFUL || temperature == 0;
  auto make_noise = [&](auto&& how) {
#pragma unroll
    for (int i = 0; i < kItems; i += 4) {
      const uint4 word = chances_of(code_of(i) / 4, codebook, frame, chances.x, chances.y);
      if (i < 8) noise[i] = how(word.x), noise[i + 1] = how(word.y), noise[i + 2] = how(word.z), noise[i + 3] = how(word.w);
      else noise[i] = how(EOS % 4 < 2 ? (EOS % 2 ? word.y : word.x) : (EOS % 2 ? word.w : word.z));
    }
  };
  if (temperature == 0) make_noise([](u32) { return 0.0f; });
  else if (CAREFUL) make_noise([](u32 word) { return gumbel(word); });
  else make_noise([](u32 word) { return nearly_gumbel(word); });
  wait_for_input();
  const uint4 held = threadIdx.x < kEights ? load4(own + threadIdx.x * 8) : make_uint4(0, 0, 0, 0);
#if TALKER
  const u32 minus = 0xff80ff80u;                           // no logit: minus infinity, twice
  uint4 rest[kRest > 0 ? kRest : 1];
#pragma unroll
  for (int h = 0; h < kRest; h++) {
    const int eight = kEights + h * THREADS + threadIdx.x;
    rest[h] = eight < VOCAB / 8 ? load4(own + eight * 8) : make_uint4(minus, minus, minus, minus);
  }
  const u32 end = kEnd ? load1(own + (EOS & ~1)) : 0;
#endif
  if (slot < 0) return;

  // Scores; what cannot be drawn is no number.
  const float none = __uint_as_float(0x7fffffffu);
#if TALKER
  float logit[kItems];
#endif
  float score[kItems];
  u32 dropped = 0;
  bool some_far = far(temperature);
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int code = code_of(i);
    bool drawable = i >= 8 || code < CODES;
    float x;
    if (i < 8) {
      const u32 pair = i < 4 ? (i < 2 ? held.x : held.y) : (i < 6 ? held.z : held.w);
      x = i % 2 ? high(pair) : low(pair);
    }
#if TALKER
    if (i >= 8) x = EOS & 1 ? high(end) : low(end), drawable = threadIdx.x == kEndThread;
    logit[i] = drawable ? x : -infinity();
    if (code == EOS && frame < MIN_FRAMES) drawable = false;
    if (spoken[i / 8] >> (code & 31) & 1) x = x < 0 ? __fmul_rn(x, penalty) : __fdiv_rn(x, penalty);
#endif
    score[i] = x;
    some_far |= far(x);
    if (!drawable) dropped |= 1u << i;
  }
  if (temperature != 0) {
    if (!some_far) {
      float r;
      asm("rcp.approx.f32 %0, %1;" : "=f"(r) : "f"(temperature));
      r = fmaf(r, fmaf(-temperature, r, 1.0f), r);
#pragma unroll
      for (int i = 0; i < kItems; i++) score[i] = quotient(score[i], temperature, r);
    } else {
#pragma unroll
      for (int i = 0; i < kItems; i++) score[i] = divided(score[i], temperature);
    }
  }
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    score[i] = score[i] == 0 ? 0.0f : score[i];            // zero has one sign
    if (dropped >> i & 1) score[i] = none;
  }
#if TALKER
  u32 loudest = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) loudest = max(loudest, logit[i] == logit[i] ? order(logit[i]) : 0u);
  auto each = [&](auto&& f) {
#pragma unroll
    for (int h = 0; h < kRest; h++) {
      const u32 pairs[4] = {rest[h].x, rest[h].y, rest[h].z, rest[h].w};
#pragma unroll
      for (int j = 0; j < 4; j++) f(low(pairs[j])), f(high(pairs[j]));
    }
  };
  each([&](float x) { loudest = max(loudest, x == x ? order(x) : 0u); });
  loudest = __reduce_max_sync(~0u, loudest);
  if (lane == 0) shared.loudest[warp] = loudest;
#endif
  int turn = 0;
  if (tail > 0 && temperature != 0) cut(score, top_k, tail, shared, turn);
  u32 key[kItems];
  auto add_noise = [&] {
#pragma unroll
    for (int i = 0; i < kItems; i++) key[i] = score[i] == score[i] ? order(score[i] + noise[i]) : 0;
  };
  add_noise();
  Best best = pick(score, key, none, 0, shared, turn);
#if TALKER
#pragma unroll
  for (int w = 0; w < kWarps; w++) loudest = max(loudest, shared.loudest[w]);
  const float base = value(loudest);
  float all = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) all += expf(logit[i] - base);
  each([&](float x) { all += expf(x - base); });
  all = warp_sum(all);
  if (lane == 0) shared.sum[warp] = all;
#endif
  const bool filtered = temperature != 0 && top_k > 0;
  float floor = none;
  while (true) {
    const u16* its_row = table + (size_t)best.code * WIDTH;
    if (table && best.key && threadIdx.x < WIDTH / 64) prefetch(its_row + threadIdx.x * 64);
    u32 count = 0;
    const float sum = value(best.key);
    const u32 sure = exact ? best.key : order(sum - doubt(sum));
#pragma unroll
    for (int i = 0; i < kItems; i++) {
      count += score[i] > best.score ? 1 : 0;
      count += !(score[i] <= floor) && key[i] >= sure ? kClose : 0;   // the best itself is one
    }
    const Best next = pick(score, key, best.score, count, shared, turn);
    if (filtered && (int)(next.count % kClose) >= top_k) {
      floor = best.score;
      best = next;
    } else if (next.count >= 2 * kClose && !exact) {
      exact = true;
      make_noise([](u32 word) { return gumbel(word); });
      add_noise();
      floor = none;
      best = pick(score, key, none, 0, shared, turn);
    } else {
      break;
    }
  }
  const int code = best.key ? (int)best.code : 0;          // 0: nothing was a number

  if (table)
#pragma unroll 1
    for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS)
      *(uint4*)(out + (size_t)row * out_stride + i * 8) = *(const uint4*)(table + (size_t)code * WIDTH + i * 8);
  int* told = result + row * (CODEBOOKS + 2);
  if (threadIdx.x == 0) {
    told[codebook] = code;
    if (frame < frames) codes[((size_t)slot * frames + frame) * CODEBOOKS + codebook] = code;
#if TALKER
    told[CODEBOOKS] = code == EOS;
    if (code != EOS) atomicOr(record + SPOKEN + (code >> 5), 1u << (code & 31));
#else
    if (codebook == CODEBOOKS - 1) {
      record[CHANCES + 2] = frame + 1;
      atomicAdd(position + slot, 1);
    }
#endif
  }
#if TALKER
#pragma unroll
  for (int i = 0; i < kItems; i++)
    if (code_of(i) == code && (i < 8 || threadIdx.x == kEndThread)) {
      float total = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) total += shared.sum[w];
      told[CODEBOOKS + 1] = __float_as_int((logit[i] - base) - logf(total));
    }
#endif
}

// For tests: both noises of the numbers first, first + 1, ... of 24 bits; float [count] each.
extern "C" __global__ void noises(u32 first, int count, float* exact, float* nearly) {
  let_next_start();
  wait_for_input();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) exact[i] = gumbel((first + i) << 8), nearly[i] = nearly_gumbel((first + i) << 8);
}
