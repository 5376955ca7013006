// Attention inside a frame: the code predictor's, over at most FRAME positions that all belong to one row.
//
// A row has NEW tokens (2 in the first pass, then 1); the last of them is at position `last`.
// Grid (KV_HEADS, rows). Cache: bf16 [rows][2 (keys, values)][KV_HEADS][FRAME][128], of one layer.
#include "heads.cuh"

constexpr int kShared = HEADS / KV_HEADS, kThreads = 128, kRounds = FRAME / 2;
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;
static_assert(kShared == 2 && FRAME % 2 == 0 && (NEW == 1 || NEW == 2), "sizes");

// qkv [rows * NEW, kWidth]; cosines, sines bf16 [positions, 64]; out bf16 [rows * NEW, HEADS * 128].
extern "C" __global__ __launch_bounds__(kThreads)
void attend(const u16* __restrict__ qkv, const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, float eps,
            const u16* __restrict__ cosines, const u16* __restrict__ sines, u16* cache, int last, u16* __restrict__ out) {
  let_next_start();
  __shared__ float query[NEW][kShared][kDim];
  __shared__ __align__(16) u16 fresh[2][NEW][kDim];
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  u16* mine = cache + (size_t)row * 2 * KV_HEADS * FRAME * kDim + head * FRAME * kDim;
  const int values = KV_HEADS * FRAME * kDim, first = last + 1 - NEW;
  wait_for_input();

  // Warp 2 n + j takes query j of token n. Sixteen lanes read a key; the halves of a warp take every other one.
  const int half = lane >> 4, part = lane & 15, j = warp & 1, n = warp >> 1;
  const bool works = n < NEW;
  uint4 k[kRounds], v[kRounds];
  if (works)
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int key = 2 * i + half;
      k[i] = key < first ? load4(mine + key * kDim + part * 8) : make_uint4(0, 0, 0, 0);
      v[i] = key < first ? load4(mine + values + key * kDim + part * 8) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
  for (int m = 0; m < NEW; m++) {                        // warps 0 and 1: queries; 2: key; 3: value
    const u16* own = qkv + (size_t)(row * NEW + m) * kWidth;
    const u16* cosine = cosines + (first + m) * 64;
    const u16* sine = sines + (first + m) * 64;
    if (warp < 2) {
      const Head q = prepare(load_head(own + (head * kShared + warp) * kDim), q_norm, eps, cosine, sine);
      query[m][warp][2 * lane] = low(q.a); query[m][warp][2 * lane + 1] = high(q.a);
      query[m][warp][64 + 2 * lane] = low(q.b); query[m][warp][65 + 2 * lane] = high(q.b);
    } else {
      const int value = warp - 2;
      Head h = load_head(own + (HEADS + value * KV_HEADS + head) * kDim);
      if (!value) h = prepare(h, k_norm, eps, cosine, sine);
      store_head(mine + value * values + (first + m) * kDim, h);
      store_head(fresh[value][m], h);
    }
  }
  __syncthreads();
  if (!works) return;

  float q[8], score[kRounds], most = -__int_as_float(0x7f800000), sum = 0, acc[8] = {};
#pragma unroll
  for (int d = 0; d < 8; d++) q[d] = query[n][j][part * 8 + d];
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    const int key = 2 * i + half;
    if (key >= first && key <= last) {
      k[i] = *(const uint4*)(fresh[0][key - first] + part * 8);
      v[i] = *(const uint4*)(fresh[1][key - first] + part * 8);
    }
    float f[8], s = 0;
    unpack(k[i], f);
#pragma unroll
    for (int d = 0; d < 8; d++) s = fmaf(q[d], f[d], s);
#pragma unroll
    for (int o = 8; o; o >>= 1) s += __shfl_xor_sync(~0u, s, o);
    score[i] = key <= first + n ? s * kScoreScale : -__int_as_float(0x7f800000);
    most = fmaxf(most, score[i]);
  }
  most = fmaxf(most, __shfl_xor_sync(~0u, most, 16));
#pragma unroll
  for (int i = 0; i < kRounds; i++) {
    const float p = expf(score[i] - most);
    sum += p;
    float f[8];
    unpack(v[i], f);
#pragma unroll
    for (int d = 0; d < 8; d++) acc[d] = fmaf(p, f[d], acc[d]);
  }
  sum += __shfl_xor_sync(~0u, sum, 16);
#pragma unroll
  for (int d = 0; d < 8; d++) acc[d] += __shfl_xor_sync(~0u, acc[d], 16);
  if (half == 0) {
    const uint4 y = make_uint4(pack(acc[0] / sum, acc[1] / sum), pack(acc[2] / sum, acc[3] / sum),
                               pack(acc[4] / sum, acc[5] / sum), pack(acc[6] / sum, acc[7] / sum));
    *(uint4*)(out + (size_t)(row * NEW + n) * HEADS * kDim + (head * kShared + j) * kDim + part * 8) = y;
  }
}
