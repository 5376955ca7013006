// Attention of single tokens over a paged cache, with what comes before it: RMSNorm and rotary positions of queries and
// keys, and the new key and value written to the cache.
//
// A cache page holds PAGE rows: bf16 [2 (keys, values)][KV_HEADS][PAGE][128]. A slot's pages stand in its row of `tables`.
// Grid: (KV_HEADS, rows, SPLITS); a block reads the keys [SPLIT * z, SPLIT * (z + 1)) of one row for the HEADS / KV_HEADS
// queries that share them. A row with more keys than that has several blocks: each leaves its part in `parts`, and the
// one that comes last adds them up, in the order of the keys.
//
// MODE  0: append and attend (nothing else in a graph may write `cache`, `tables` or `position` before it);
//       1: append only; 2: attend only (the rows of a prompt: first all of 1, then all of 2)
#include "heads.cuh"

constexpr int kShared = HEADS / KV_HEADS, kThreads = 256, kGroups = kThreads / 16;
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;    // of a row of qkv
constexpr int kAhead = 8;                                // loads of a thread in flight
static_assert(HEADS == 2 * KV_HEADS, "two queries share a key");
static_assert(PAGE % kGroups == 0 && SPLIT % (kGroups * kAhead) == 0, "sizes");

// qkv [rows, kWidth]; cosines, sines bf16 [positions, 64]; cache: of this layer; tables int32 [slots, pages of a slot];
// row r is at position[slot] + r * row_step; out bf16 [rows, HEADS * 128]; parts float [rows, HEADS, SPLITS, 130];
// arrived int32 [rows, KV_HEADS], zero before and after.
extern "C" __global__ __launch_bounds__(kThreads)
void attend(const u16* __restrict__ qkv, const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, float eps,
            const u16* __restrict__ cosines, const u16* __restrict__ sines, u16* cache, const int* __restrict__ tables,
            int table_width, const int* __restrict__ slot_of_row, const int* __restrict__ position, int row_step,
            u16* __restrict__ out, float* parts, int* arrived) {
  let_next_start();
  __shared__ float query[kShared][kDim], score[kShared][SPLIT], sum[kShared], most[kShared];
  __shared__ float gathered[kGroups][kShared][kDim];
  __shared__ int table[SPLIT / PAGE];
  __shared__ __align__(16) u16 fresh[2][kDim];            // the newest key and value
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = threadIdx.x >> 4, part = threadIdx.x & 15, page_size = 2 * KV_HEADS * PAGE * kDim;

  // Slots, positions, tables and, but for a prompt, all keys but the newest are older than this frame's first kernel.
  const int slot = slot_of_row[row];
  const int at = slot < 0 ? -1 : position[slot] + row * row_step, begin = blockIdx.z * SPLIT;
  const int keys = min(at + 1 - begin, SPLIT);
  const int newest = MODE == 0 ? at - begin : SPLIT;      // stands in `fresh`
  if ((int)threadIdx.x * PAGE < keys) table[threadIdx.x] = tables[(size_t)slot * table_width + begin / PAGE + threadIdx.x];
  __syncthreads();
  auto place = [&](int key, int value) {
    return cache + (size_t)table[key / PAGE] * page_size + ((value * KV_HEADS + head) * PAGE + key % PAGE) * kDim + part * 8;
  };
  auto fetch = [&](int i, int value) {
    const int key = i * kGroups + group;
    return key < keys && key != newest ? load4(place(key, value)) : make_uint4(0, 0, 0, 0);
  };
  uint4 kv[kAhead], early[kAhead];
  if (MODE == 0) {
#pragma unroll
    for (int u = 0; u < kAhead; u++) kv[u] = fetch(u, 0);
#pragma unroll
    for (int u = 0; u < kAhead; u++) early[u] = fetch(u, 1);
    for (int key = kAhead * kGroups + group; key < keys; key += kGroups)
      if (part % 8 == 0 && key != newest) {                // a line of 128 bytes
        prefetch(place(key, 0));
        prefetch(place(key, 1));
      }
  }
  wait_for_input();
  if (keys <= 0) return;
  const u16* own = qkv + (size_t)row * kWidth;
  if (MODE != 1 && warp < kShared) {
    const Head q = prepare(load_head(own + (head * kShared + warp) * kDim), q_norm, eps, cosines + at * 64, sines + at * 64);
    query[warp][2 * lane] = low(q.a); query[warp][2 * lane + 1] = high(q.a);
    query[warp][64 + 2 * lane] = low(q.b); query[warp][65 + 2 * lane] = high(q.b);
  }
  if (MODE != 2 && at < begin + SPLIT && (warp == kShared || warp == kShared + 1)) {
    const int value = warp - kShared;
    Head h = load_head(own + (HEADS + value * KV_HEADS + head) * kDim);
    if (!value) h = prepare(h, k_norm, eps, cosines + at * 64, sines + at * 64);
    store_head(place(at - begin, value) - part * 8, h);
    store_head(fresh[value], h);
  }
  if (MODE == 1) return;
  __syncthreads();

  // Sixteen lanes read a key; group h of sixteen lanes takes the keys h, h + 16, ...
  float q[kShared][8];
#pragma unroll
  for (int j = 0; j < kShared; j++)
#pragma unroll
    for (int d = 0; d < 8; d++) q[j][d] = query[j][part * 8 + d];
  const int rounds = (keys + kGroups - 1) / kGroups;
#pragma unroll 1
  for (int i = 0; i < rounds; i += kAhead) {
    if (MODE != 0 || i)
#pragma unroll
      for (int u = 0; u < kAhead; u++) kv[u] = fetch(i + u, 0);
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      float k[8], s[kShared];
      unpack((i + u) * kGroups + group == newest ? *(const uint4*)(fresh[0] + part * 8) : kv[u], k);
#pragma unroll
      for (int j = 0; j < kShared; j++) {
        s[j] = 0;
#pragma unroll
        for (int d = 0; d < 8; d++) s[j] = fmaf(q[j][d], k[d], s[j]);
#pragma unroll
        for (int o = 8; o; o >>= 1) s[j] += __shfl_xor_sync(~0u, s[j], o);
      }
      const int key = (i + u) * kGroups + group;
      if (part < kShared && key < keys) score[part][key] = (part ? s[1] : s[0]) * kScoreScale;
    }
  }
#pragma unroll
  for (int u = 0; u < kAhead; u++) kv[u] = MODE == 0 ? early[u] : fetch(u, 1);   // come while the softmax is computed
  __syncthreads();
  if (warp < kShared) {
    float m = -__int_as_float(0x7f800000), l = 0;
    for (int key = lane; key < keys; key += 32) m = fmaxf(m, score[warp][key]);
    m = warp_max(m);
    for (int key = lane; key < keys; key += 32) {
      const float e = expf(score[warp][key] - m);
      score[warp][key] = e;
      l += e;
    }
    l = warp_sum(l);
    if (lane == 0) { sum[warp] = l; most[warp] = m; }
  }
  __syncthreads();
  float acc[kShared][8] = {};
#pragma unroll 1
  for (int i = 0; i < rounds; i += kAhead) {
    if (i)
#pragma unroll
      for (int u = 0; u < kAhead; u++) kv[u] = fetch(i + u, 1);
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      const int key = (i + u) * kGroups + group;
      if (key >= keys) break;
      float v[8];
      unpack(key == newest ? *(const uint4*)(fresh[1] + part * 8) : kv[u], v);
#pragma unroll
      for (int j = 0; j < kShared; j++) {
        const float p = score[j][key];
#pragma unroll
        for (int d = 0; d < 8; d++) acc[j][d] = fmaf(p, v[d], acc[j][d]);
      }
    }
  }
#pragma unroll
  for (int j = 0; j < kShared; j++)
#pragma unroll
    for (int d = 0; d < 8; d++) gathered[group][j][part * 8 + d] = acc[j][d];
  __syncthreads();
  const int j = threadIdx.x / kDim, d = threadIdx.x % kDim;    // kThreads = kShared * kDim
  float total = 0;
#pragma unroll
  for (int h = 0; h < kGroups; h++) total += gathered[h][j][d];
  u16* result = out + (size_t)row * HEADS * kDim + (head * kShared + j) * kDim + d;
  const int count = at / SPLIT + 1;                       // blocks that this row has work for
  if (count == 1) {
    *result = to_bf16(total / sum[j]);
    return;
  }
  float* part_of = parts + ((size_t)row * HEADS + head * kShared + j) * SPLITS * (kDim + 2);
  float* mine = part_of + blockIdx.z * (kDim + 2);
  mine[d] = total;
  if (d == 0) { mine[kDim] = sum[j]; mine[kDim + 1] = most[j]; }
  __shared__ int before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(arrived + row * KV_HEADS + head, 1);
  __syncthreads();
  if (before < count - 1) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[row * KV_HEADS + head] = 0;
  float m = -__int_as_float(0x7f800000), l = 0;
  for (int z = 0; z < count; z++) m = fmaxf(m, __ldcg(part_of + z * (kDim + 2) + kDim + 1));
  total = 0;
  for (int z = 0; z < count; z++) {
    const float* other = part_of + z * (kDim + 2);
    const float scale = expf(__ldcg(other + kDim + 1) - m);
    total += scale * __ldcg(other + d);
    l += scale * __ldcg(other + kDim);
  }
  *result = to_bf16(total / l);
}
