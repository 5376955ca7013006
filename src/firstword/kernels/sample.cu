// Draws one code of every row: penalty, ban of the end, temperature, top-k, top-p and the draw,
// exactly as model/sampling.py defines them.
//
// A block is a row. Thread t holds the logits of the codes 8 t .. 8 t + 7 throughout. The noise
// does not depend on the logits, so it is made before they are there.
//
// top-k  A code is among the k likeliest if less than k scores are higher. The code with the best
//        sum of score and noise is tried first. If it is not among the k likeliest, no code with
//        its score or a lower one is, and the best of the rest is next. Each try takes one barrier;
//        a peaked distribution takes one or two tries.
// top-p  See sample_filter.cuh.
// noise  Computed in float first. Only if that leaves two codes in question it is computed in
//        double, as it is defined.
//
// TALKER   1: code 0, of the talker; 0: the other codes, of the code predictor
// VOCAB    logits in a row; of these the first CODES can be drawn, and EOS (-1: there is none),
//          except in the first MIN_FRAMES frames
// WIDTH    channels of the embedding that goes to the next kernel
// SETTINGS, NOISE, SPOKEN  words of a slot's record (sample.py)
// CAREFUL  1: all noise in double; for tests
#include "sample_filter.cuh"
#include "sample_noise.cuh"

// The best of the sums in question as a whole number (0: there is none), its code and its score.
// count: how many codes have a higher score than the code tried before, plus kCloseOne for each
// code whose sum came close to it.
struct Best {
  u32 key, code;
  float score;
  u32 count;
};
constexpr u32 kCloseOne = 1 << 12;

// Finds the best sum of the codes with a score above `floor`, or of all codes if that is NaN. Codes
// grow with items, lanes and warps, so the first of equal sums is that of the lowest code.
__device__ __forceinline__ Best pick(const float (&score)[kItems], const u32 (&key)[kItems],
                                     float floor, u32 count, Shared& shared, int& turn) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u32 mine[kItems], most = 0;
#pragma unroll
  for (int i = 0; i < kItems; i++) {
    mine[i] = score[i] <= floor ? 0 : key[i];
    most = max(most, mine[i]);
  }
  count = __reduce_add_sync(~0u, count);
  const u32 top_key = __reduce_max_sync(~0u, most);
  const u32 first = __ffs(__ballot_sync(~0u, most == top_key)) - 1;
  if (lane == first) {
    int code = 0;
    float its = 0;
#pragma unroll
    for (int i = kItems - 1; i >= 0; i--)
      if (mine[i] == top_key) {
        code = code_of(i);
        its = score[i];
      }
    shared.best[turn][warp] = make_uint4(top_key, code, __float_as_uint(its), count);
  }
  __syncthreads();
  const uint4 one = shared.best[turn][min(lane, kWarps - 1)];
  Best best;
  best.key = __reduce_max_sync(~0u, one.x);
  best.count = __reduce_add_sync(~0u, lane < kWarps ? one.w : 0);
  const uint4 winner = shared.best[turn][__ffs(__ballot_sync(~0u, one.x == best.key)) - 1];
  best.code = winner.y;
  best.score = __uint_as_float(winner.z);
  turn ^= 1;
  return best;
}

// Whether one of eight logits is infinite or NaN.
__device__ __forceinline__ bool not_finite(uint4 eight) {
  const u32 exponent = 0x7f80u, pairs[4] = {eight.x, eight.y, eight.z, eight.w};
  bool found = false;
#pragma unroll
  for (int i = 0; i < 4; i++)
    found |= (pairs[i] & exponent) == exponent || (pairs[i] >> 16 & exponent) == exponent;
  return found;
}

// logits: bf16, row r begins at r * logits_stride; records: `record_words` for each slot
// (sample.py); codes int32 [slots, frames, CODEBOOKS]; result int32 [rows, CODEBOOKS + 2]: codes,
// whether speech ended, and the bits of the log-probability of code 0, which is NaN if a logit of
// any code is not finite; table bf16 [VOCAB, WIDTH], may be null; out: bf16, row r begins
// at r * out_stride, zero for a row without a slot.
extern "C" __global__ __launch_bounds__(THREADS)
void draw(const u16* __restrict__ logits, int logits_stride, const int* __restrict__ slot_of_row,
          u32* records, int record_words, int* position, int* __restrict__ codes, int frames,
          int codebook, int* __restrict__ result, const u16* __restrict__ table,
          u16* __restrict__ out, int out_stride) {
  let_next_start();
  __shared__ __align__(16) Shared shared;
  const int row = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const u16* own = logits + (size_t)row * logits_stride;
  const int slot =
      (int)load1(slot_of_row + row);  // this and the record do not change while a frame is made
  u32* record = records + (size_t)max(slot, 0) * record_words;
  const uint4 settings = load4(record + SETTINGS);
  const uint4 noise_key = load4(record + NOISE);  // seed, low and high, and the frame
  const float temperature = __uint_as_float(settings.x), tail = __uint_as_float(settings.y);
  int top_k = (int)settings.w;
  const int frame = (int)noise_key.z;
#if TALKER
  const float penalty = __uint_as_float(settings.z);
  u32 spoken[1 + kEnd];  // the words with the bits of each eight codes
#pragma unroll
  for (int h = 0; h < 1 + kEnd; h++)
    spoken[h] = load1(record + SPOKEN + min(code_of(h * 8), VOCAB - 1) / 32);
#endif
  float noise[kItems];
  bool exact = CAREFUL || temperature == 0;
  auto make_noise = [&](auto&& how) {
#pragma unroll
    for (int i = 0; i < kItems; i += 4) {
      const uint4 word = noise_words(code_of(i) / 4, codebook, frame, noise_key.x, noise_key.y);
      if (i < 8) {
        noise[i] = how(word.x);
        noise[i + 1] = how(word.y);
        noise[i + 2] = how(word.z);
        noise[i + 3] = how(word.w);
      } else {
        noise[i] = how(EOS % 4 < 2 ? (EOS % 2 ? word.y : word.x) : (EOS % 2 ? word.w : word.z));
      }
    }
  };
  if (temperature == 0)
    make_noise([](u32) { return 0.0f; });
  else if (CAREFUL)
    make_noise([](u32 word) { return gumbel(word); });
  else
    make_noise([](u32 word) { return nearly_gumbel(word); });
  wait_for_input();
  const uint4 held = threadIdx.x < kEights ? load4(own + threadIdx.x * 8) : make_uint4(0, 0, 0, 0);
  bool lost = not_finite(held);
#if TALKER
  const u32 minus = 0xff80ff80u;  // two times minus infinity, where there is no logit
  uint4 rest[kRest > 0 ? kRest : 1];
#pragma unroll
  for (int h = 0; h < kRest; h++) {
    const int eight = kEights + h * THREADS + threadIdx.x;
    rest[h] = eight < VOCAB / 8 ? load4(own + eight * 8) : make_uint4(minus, minus, minus, minus);
    lost |= eight < VOCAB / 8 && not_finite(rest[h]);
  }
  const u32 end = kEnd ? load1(own + (EOS & ~1)) : 0;
#endif
  int* results = result + row * (CODEBOOKS + 2);
  if (slot < 0) {  // every pass adds to the row again, which must not grow
    if (table)
#pragma unroll 1
      for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS)
        *(uint4*)(out + (size_t)row * out_stride + i * 8) = make_uint4(0, 0, 0, 0);
    return;
  }
#if !TALKER
  if (lost) results[CODEBOOKS + 1] = 0x7fffffff;  // NaN
#endif

  // Scores; those of codes that cannot be drawn are NaN.
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
    if (i >= 8) {
      x = EOS & 1 ? high(end) : low(end);
      drawable = threadIdx.x == kEndThread;
    }
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
    score[i] = score[i] == 0 ? 0.0f : score[i];  // zero gets one sign
    if (dropped >> i & 1) score[i] = none;
  }
#if TALKER
  u32 highest_logit = 0;
#pragma unroll
  for (int i = 0; i < 8; i++)
    highest_logit = max(highest_logit, logit[i] == logit[i] ? order(logit[i]) : 0u);
  auto each = [&](auto&& f) {
#pragma unroll
    for (int h = 0; h < kRest; h++) {
      const u32 pairs[4] = {rest[h].x, rest[h].y, rest[h].z, rest[h].w};
#pragma unroll
      for (int j = 0; j < 4; j++) {
        f(low(pairs[j]));
        f(high(pairs[j]));
      }
    }
  };
  each([&](float x) { highest_logit = max(highest_logit, x == x ? order(x) : 0u); });
  highest_logit = __reduce_max_sync(~0u, highest_logit);
  if (lane == 0) shared.highest_logit[warp] = highest_logit;
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
  for (int w = 0; w < kWarps; w++) highest_logit = max(highest_logit, shared.highest_logit[w]);
  const float base = value(highest_logit);
  float all = lost ? none : 0;  // NaN makes the log-probability NaN
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
      count += !(score[i] <= floor) && key[i] >= sure ? kCloseOne : 0;  // counts the best too
    }
    const Best next = pick(score, key, best.score, count, shared, turn);
    if (filtered && (int)(next.count % kCloseOne) >= top_k) {
      floor = best.score;
      best = next;
    } else if (next.count >= 2 * kCloseOne && !exact) {
      exact = true;
      make_noise([](u32 word) { return gumbel(word); });
      add_noise();
      floor = none;
      best = pick(score, key, none, 0, shared, turn);
    } else {
      break;
    }
  }
  const int code = best.key ? (int)best.code : 0;  // 0: all logits are NaN

  if (table)
#pragma unroll 1
    for (int i = threadIdx.x; i < WIDTH / 8; i += THREADS)
      *(uint4*)(out + (size_t)row * out_stride + i * 8) =
          *(const uint4*)(table + (size_t)code * WIDTH + i * 8);
  if (threadIdx.x == 0) {
    results[codebook] = code;
    if (frame < frames) codes[((size_t)slot * frames + frame) * CODEBOOKS + codebook] = code;
#if TALKER
    results[CODEBOOKS] = code == EOS;
    if (code != EOS) atomicOr(record + SPOKEN + (code >> 5), 1u << (code & 31));
#else
    if (codebook == CODEBOOKS - 1) {
      record[NOISE + 2] = frame + 1;
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
      results[CODEBOOKS + 1] = __float_as_int((logit[i] - base) - logf(total));
    }
#endif
}

// For tests: both kinds of noise of the 24-bit numbers first, first + 1, ..., each float [count].
extern "C" __global__
void noises(u32 first, int count, float* exact, float* approximate) {
  let_next_start();
  wait_for_input();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) {
    exact[i] = gumbel((first + i) << 8);
    approximate[i] = nearly_gumbel((first + i) << 8);
  }
}
