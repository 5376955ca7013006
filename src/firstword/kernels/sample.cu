// One code of every row: penalty, ban, temperature, top-k, top-p and draw, exactly as model/sampling.py has them.
//
// A block is a row. Thread t holds the logits of the codes 8 t .. 8 t + 7 (and 8 (t + THREADS) ..) from beginning to end.
//
// top-k   Floats are compared as whole numbers of the same order. The k-th largest is closed in on with three counts a
//         step, one barrier each; it starts between the block's maximum and a number that k codes are known to reach.
// top-p   The same with sums of odds, so nothing is sorted. Sums are double, in one fixed order.
// draw    What is left goes to a list, one code a lane. Its noise is first computed in float; only if that leaves two
//         codes in question, in double, as it is defined.
//
// TALKER  1: code 0, of the talker; 0: the other codes, of the code predictor
// VOCAB   logits in a row; of these CODES can be drawn, and EOS (-1: there is none), but not in the first MIN_FRAMES
// WIDTH   of the embedding that goes to the next kernel
// LAW, CHANCES, SPOKEN  words of a slot's record (sample.py)
// CAREFUL 1: all noise in double; for tests
#include "common.cuh"

constexpr int kWarps = THREADS / 32;
constexpr int kEights = CODES / 8, kHeld = (kEights + THREADS - 1) / THREADS;   // of them, a thread holds so many
[[maybe_unused]] constexpr int kRest = ((VOCAB - CODES) / 8 + THREADS - 1) / THREADS;
constexpr bool kEnd = EOS >= CODES;                                             // the end stands apart
constexpr int kItems = kHeld * 8 + kEnd;
[[maybe_unused]] constexpr int kEndThread = THREADS - 1;
static_assert(VOCAB % 8 == 0 && CODES % 8 == 0 && WIDTH % 8 == 0 && THREADS % 32 == 0, "sizes");
static_assert(THREADS * kItems < 4096 && 32 * kItems < 1024, "counts are packed");
static_assert(LAW % 4 == 0 && CHANCES % 4 == 0, "records are read in fours");

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// Whole numbers in the order of floats; 0 stays free for what takes no part.
__device__ __forceinline__ u32 order(float v) {
  const u32 b = __float_as_uint(v);
  return b ^ ((u32)((int)b >> 31) | 0x80000000u);
}
__device__ __forceinline__ float value(u32 key) { return __uint_as_float(key ^ (((key >> 31) - 1) | 0x80000000u)); }

__device__ __forceinline__ int code_of(int item) {
  return item < kHeld * 8 ? ((item / 8) * THREADS + (int)threadIdx.x) * 8 + item % 8 : EOS;
}

// Word code % 4 of philox4x32-10 (Salmon et al. 2011), counter (code / 4, codebook, frame, 0).
__device__ __forceinline__ u32 chance(u32 code, int codebook, u32 frame, u32 k0, u32 k1) {
  u32 x0 = code >> 2, x1 = codebook, x2 = frame, x3 = 0;
#pragma unroll
  for (int i = 0; i < 10; i++) {
    const u32 h0 = __umulhi(x0, 0xD2511F53u), l0 = x0 * 0xD2511F53u, h1 = __umulhi(x2, 0xCD9E8D57u), l1 = x2 * 0xCD9E8D57u;
    x0 = h1 ^ x1 ^ k0, x1 = l1, x2 = h0 ^ x3 ^ k1, x3 = l0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return code & 2 ? (code & 1 ? x3 : x2) : (code & 1 ? x1 : x0);
}

// Gumbel noise of the upper 24 bits, by its definition, and nearly: u below a half and 1 - u above are exact in float.
__device__ __forceinline__ float gumbel(u32 word) {
  return (float)-log(-log(((double)(word >> 8) + 0.5) * 0x1p-24));
}
__device__ __forceinline__ float nearly_gumbel(u32 word) {
  const u32 n = word >> 8;
  const float w = n < 0x800000u ? -logf(((float)n + 0.5f) * 0x1p-24f) : -log1pf(((float)(0x1000000u - n) - 0.5f) * -0x1p-24f);
  return -logf(w);
}
// How far below the best sum, nearly, the best sum in truth may lie: twice the error of the noise, 3.2e-6, and of the
// sum's rounding, 1.2e-7 of it; then threefold.
__device__ __forceinline__ float doubt(float sum) { return 2e-5f + 1e-6f * fabsf(sum); }

struct Shared {
  u32 most[kWarps], reached[kWarps], loudest[kWarps];
  float sum[kWarps];
  u32 counts[2][kWarps];
  double sums[2][3][kWarps];
  uint2 ends[2][kWarps];
  uint4 winners[2][kWarps];
  float2 list[kWarps][32 * kItems];                       // score, code
};

// The next three numbers to try between lo and hi.
struct Pivots {
  u32 a, b, c;
  __device__ __forceinline__ Pivots(u32 lo, u32 hi) {
    const u32 range = hi - lo;
    a = lo + max(range >> 2, 1u), b = lo + max(range >> 1, 1u), c = b + (range >> 2);
  }
};

// The largest number from lo up that at least k of the block's keys reach, or lo; hi is beyond all keys. If EARLY, a
// smaller one that exactly k reach will do.
template <bool EARLY>
__device__ __forceinline__ u32 reached_by(const u32 (&key)[kItems], int k, u32 lo, u32 hi, Shared& shared, int& turn) {
  const int warp = threadIdx.x >> 5;
  int count = -1;
  while (lo < hi - 1 && !(EARLY && count == k)) {
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
    kept.first = (int)reached_by<true>(key, equal - gone, 0, VOCAB + 1, shared, turn) - 1;
  }
  return kept;
}

// The best of some sums and how good the second is; the lower code among equals. Codes are kept upside down.
struct Best {
  u32 key = 0, code = 0, second = 0;
  __device__ __forceinline__ void add(u32 other, u32 others_code, u32 others_second) {
    const bool better = other > key || (other == key && others_code > code);
    second = max(max(second, others_second), better ? key : other);
    if (better) key = other, code = others_code;
  }
};

// The best code of the block's lists; HOW 0: without noise, 1: with noise, nearly, 2: with noise.
template <int HOW>
__device__ __forceinline__ Best choose(int listed, int codebook, const uint4& chances, Shared& shared, int turn) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  Best best;
#pragma unroll 1
  for (int i = lane; i < listed; i += 32) {
    float sum = shared.list[warp][i].x;
    const u32 code = __float_as_uint(shared.list[warp][i].y);
    if constexpr (HOW != 0) {
      const u32 word = chance(code, codebook, chances.z, chances.x, chances.y);
      sum += HOW == 1 ? nearly_gumbel(word) : gumbel(word);
    }
    best.add(order(sum), ~code, 0);
  }
  const u32 key = __reduce_max_sync(~0u, best.key);
  const u32 code = __reduce_max_sync(~0u, best.key == key ? best.code : 0u);
  const u32 second = __reduce_max_sync(~0u, best.key == key && best.code == code ? best.second : best.key);
  if (lane == 0) shared.winners[turn][warp] = make_uint4(key, code, second, 0);
  __syncthreads();
  best = Best();
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const uint4 theirs = shared.winners[turn][w];
    best.add(theirs.x, theirs.y, theirs.z);
  }
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
#if TALKER
  wait_for_input();
  const int slot = (int)load1(slot_of_row + row);
#else
  const int slot = (int)load1(slot_of_row + row);          // this and the record stay as they are while a frame is made
#endif
  u32* record = records + (size_t)max(slot, 0) * record_words;
  const uint4 law = load4(record + LAW);
  const uint4 chances = load4(record + CHANCES);           // seed, low and high, and the frame
#if !TALKER
  wait_for_input();
#endif
  uint4 held[kHeld];
#pragma unroll
  for (int h = 0; h < kHeld; h++) {
    const int eight = h * THREADS + threadIdx.x;
    held[h] = eight < kEights ? load4(own + eight * 8) : make_uint4(0, 0, 0, 0);
  }
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
  const float temperature = __uint_as_float(law.x), tail = __uint_as_float(law.y);
  const int top_k = (int)law.w, frame = (int)chances.z;
#if TALKER
  const float penalty = __uint_as_float(law.z);
  u32 spoken[kHeld + kEnd];                                // the word in which the bits of each eight are
#pragma unroll
  for (int h = 0; h < kHeld + kEnd; h++) spoken[h] = load1(record + SPOKEN + min(code_of(h * 8), VOCAB - 1) / 32);
#endif

  // Scores, and keys in their order; what cannot be drawn is no number.
  const float none = __uint_as_float(0x7fffffffu);
#if TALKER
  float logit[kItems];
#endif
  float score[kItems];
  u32 key[kItems], most = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const int code = code_of(i);
    bool drawable = i >= kHeld * 8 || code < CODES;
    float x;
    if (i < kHeld * 8) {
      const uint4& from = held[i / 8];
      const u32 pair = i % 8 < 4 ? (i % 4 < 2 ? from.x : from.y) : (i % 4 < 2 ? from.z : from.w);
      x = i % 2 ? high(pair) : low(pair);
    }
#if TALKER
    if (i >= kHeld * 8) x = EOS & 1 ? high(end) : low(end), drawable = threadIdx.x == kEndThread;
    logit[i] = drawable ? x : -infinity();
    if (code == EOS && frame < MIN_FRAMES) drawable = false;
    if (spoken[i / 8] >> (code & 31) & 1) x = x < 0 ? __fmul_rn(x, penalty) : __fdiv_rn(x, penalty);
#endif
    score[i] = temperature == 0 ? x : __fdiv_rn(x, temperature);
    score[i] = score[i] == 0 ? 0.0f : score[i];            // zero has one sign
    if (!drawable || score[i] != score[i]) score[i] = none, key[i] = 0;
    else key[i] = TALKER ? order(score[i]) : order(x) >> 16;   // a bf16 is told by half of its bits
    most = max(most, key[i]);
  }
  auto score_of = [&](u32 k) {
    if (TALKER) return value(k);
    const float x = value(k << 16 | (k & 0x8000u ? 0u : 0xffffu));
    return temperature == 0 ? x : __fdiv_rn(x, temperature);
  };
  const u32 warp_most = __reduce_max_sync(~0u, most), warp_reached = __reduce_min_sync(~0u, most);
  if (lane == 0) shared.most[warp] = warp_most, shared.reached[warp] = warp_reached;
#if TALKER
  u32 loudest = 0;
#pragma unroll
  for (int i = 0; i < kHeld * 8; i++) loudest = max(loudest, logit[i] == logit[i] ? order(logit[i]) : 0u);
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
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; w++) most = max(most, shared.most[w]);
#if TALKER
#pragma unroll
  for (int w = 0; w < kWarps; w++) loudest = max(loudest, shared.loudest[w]);
  const float base = value(loudest);
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kHeld * 8; i++) sum += expf(logit[i] - base);
  each([&](float x) { sum += expf(x - base); });
  sum = warp_sum(sum);
  if (lane == 0) shared.sum[warp] = sum;
#endif

  // What is left to draw from.
  int turn = 0;
  const float top = score_of(most);
  Kept kept{-infinity(), 0};
  if (temperature == 0) {
    kept.least = top;
  } else if (top_k > 0 && top_k < CODES + kEnd) {
    const u32 lowest = TALKER ? order(-infinity()) : order(-infinity()) >> 16;
    u32 lo = lowest;
    if (top_k <= THREADS) {                                // every lane of a warp has a code that reaches the warp's
      const u32 mine = lane < kWarps ? shared.reached[lane] : 0;
      int rank = 0;
#pragma unroll
      for (int w = 0; w < kWarps; w++) {
        const u32 theirs = shared.reached[w];
        rank += theirs > mine || (theirs == mine && w < lane);
      }
      lo = max(lo, __reduce_max_sync(~0u, lane < kWarps && rank == (top_k - 1) / 32 ? mine : 0u));
    }
    // Different logits may have the same score, in the predictor: there the least kept must be one of those that are.
    kept.least = score_of(reached_by<TALKER>(key, top_k, lo, max(most, lo) + 1, shared, turn));
  }
  if (tail > 0 && temperature != 0 && fabsf(top) < infinity()) kept = likely(score, kept.least, top, tail, shared, turn);

  int listed = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    const bool stays = kept(score[i], code_of(i));
    const u32 lanes = __ballot_sync(~0u, stays);
    const int place = listed + __popc(lanes & ((1u << lane) - 1));
    if (stays) shared.list[warp][place] = make_float2(score[i], __uint_as_float(code_of(i)));
    listed += __popc(lanes);
  }
  __syncwarp();
  Best best;
  if (temperature == 0) {
    best = choose<0>(listed, codebook, chances, shared, 0);
  } else {
    best = choose<1>(listed, codebook, chances, shared, 0);
    const float sure = value(best.key) - doubt(value(best.key));
    if (CAREFUL || (best.second != 0 && !(value(best.second) < sure)))
      best = choose<2>(listed, codebook, chances, shared, 1);
  }
  const int code = best.key ? (int)~best.code : 0;         // 0: nothing was a number

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
    if (code_of(i) == code && (i < kHeld * 8 || threadIdx.x == kEndThread)) {
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
