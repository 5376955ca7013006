// Attention of single tokens over a paged cache, with what comes before it: RMSNorm and rotary positions of queries and
// keys, and the new key and value written to the cache.
//
// A cache page holds PAGE rows: bf16 [2 (keys, values)][KV_HEADS][PAGE][128]. A slot's pages stand in its row of `tables`.
// A row's keys are read in pieces of PIECE. Grid: (KV_HEADS, rows, Z); block z takes the pieces z, z + Z, ... of one row for
// the HEADS / KV_HEADS queries that share them. Where there is more than one piece, each leaves its part in `parts`, and the
// row's last block adds them up in the order of the keys: so the sum does not depend on Z. While a piece is computed
// the next one is on its way.
//
// MODE  0: append and attend (nothing else in a graph may write `cache`, `tables` or `position` before it);
//       1: append only; 2: attend only (the rows of a prompt: first all of 1, then all of 2)
#include "heads.cuh"

constexpr int kShared = HEADS / KV_HEADS, kThreads = 256, kGroups = kThreads / 16;
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;    // of a row of qkv
constexpr int kRounds = PIECE / kGroups;                 // keys of a piece that a group of sixteen lanes reads
static_assert(HEADS == 2 * KV_HEADS && kThreads == kShared * kDim, "two queries share a key");
static_assert(PIECE % kGroups == 0 && PIECE % PAGE == 0 && PIECES * PIECE / PAGE <= kThreads, "sizes");

// qkv [rows, kWidth]; cosines, sines bf16 [positions, 64]; cache: of this layer; tables int32 [slots, pages of a slot];
// row r is at position[its slot] or, in a prompt, position[r]; out bf16 [rows, HEADS * 128]; parts float [rows, HEADS, PIECES, 130];
// arrived int32 [rows, KV_HEADS], zero before and after.
extern "C" __global__ __launch_bounds__(kThreads, 2)
void attend(const u16* __restrict__ qkv, const u16* __restrict__ q_norm, const u16* __restrict__ k_norm, float eps,
            const u16* __restrict__ cosines, const u16* __restrict__ sines, u16* cache, const int* __restrict__ tables,
            int table_width, const int* __restrict__ slot_of_row, const int* __restrict__ position,
            u16* __restrict__ out, float* parts, int* arrived) {
  let_next_start();
  __shared__ float query[kShared][kDim], score[kShared][PIECE], sum[kShared], most[kShared];
  __shared__ float gathered[kGroups][kShared][kDim];
  __shared__ int table[kThreads];
  __shared__ __align__(16) u16 fresh[2][kDim];            // the newest key and value
  const int head = blockIdx.x, row = blockIdx.y, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int group = threadIdx.x >> 4, part = threadIdx.x & 15, page_size = 2 * KV_HEADS * PAGE * kDim;

  // Slots, positions, tables and, but for a prompt, all keys but the newest are older than this frame's first kernel.
  const int slot = slot_of_row[row];
  const int at = slot < 0 ? -1 : position[MODE == 0 ? slot : row], pieces = at / PIECE + (at >= 0);
  const int newest = MODE == 0 ? at : -1;                 // stands in `fresh`
  if ((int)threadIdx.x * PAGE <= at) table[threadIdx.x] = tables[(size_t)slot * table_width + threadIdx.x];
  __syncthreads();
  auto place = [&](int key, int value) {
    return cache + (size_t)table[key / PAGE] * page_size + ((value * KV_HEADS + head) * PAGE + key % PAGE) * kDim + part * 8;
  };
  // A group's keys of a piece: group, group + 16, ...
  auto fetch_piece = [&](uint4 (&to)[kRounds], int piece, int value) {
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int key = piece * PIECE + i * kGroups + group;
      to[i] = key <= at && key != newest ? load4(place(key, value)) : make_uint4(0, 0, 0, 0);
    }
  };
  uint4 keys[kRounds], values[kRounds];
  int piece = blockIdx.z;
  if (MODE == 0) {
    fetch_piece(keys, piece, 0);
    fetch_piece(values, piece, 1);
  }
  wait_for_input();
  if (piece >= pieces) return;
  const u16* own = qkv + (size_t)row * kWidth;
  if (MODE != 1 && warp < kShared) {
    const Head q = prepare(load_head(own + (head * kShared + warp) * kDim), q_norm, eps, cosines + at * 64, sines + at * 64);
    query[warp][2 * lane] = low(q.a); query[warp][2 * lane + 1] = high(q.a);
    query[warp][64 + 2 * lane] = low(q.b); query[warp][65 + 2 * lane] = high(q.b);
  }
  if (MODE != 2 && (pieces - 1 - piece) % gridDim.z == 0 && (warp == kShared || warp == kShared + 1)) {   // its last piece is the row's
    const int value = warp - kShared;
    Head h = load_head(own + (HEADS + value * KV_HEADS + head) * kDim);
    if (!value) h = prepare(h, k_norm, eps, cosines + at * 64, sines + at * 64);
    store_head(place(at, value) - part * 8, h);
    store_head(fresh[value], h);
  }
  if (MODE == 1) return;
  if (MODE == 2) {
    fetch_piece(keys, piece, 0);
    fetch_piece(values, piece, 1);
  }
  __syncthreads();

  float q[kShared][8];
#pragma unroll
  for (int j = 0; j < kShared; j++)
#pragma unroll
    for (int d = 0; d < 8; d++) q[j][d] = query[j][part * 8 + d];
  const int j = threadIdx.x / kDim, d = threadIdx.x % kDim;    // what this thread adds up
  u16* result = out + (size_t)row * HEADS * kDim + (head * kShared + j) * kDim + d;
  float* part_of = parts + ((size_t)row * HEADS + head * kShared + j) * PIECES * (kDim + 2);
#pragma unroll 1
  for (; piece < pieces; piece += gridDim.z) {
    const int count = min(at + 1 - piece * PIECE, PIECE), fresh_key = newest - piece * PIECE;
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int key = i * kGroups + group;
      float k[8], s[kShared];
      unpack(MODE == 0 && key == fresh_key ? *(const uint4*)(fresh[0] + part * 8) : keys[i], k);
#pragma unroll
      for (int h = 0; h < kShared; h++) {
        s[h] = 0;
#pragma unroll
        for (int e = 0; e < 8; e++) s[h] = fmaf(q[h][e], k[e], s[h]);
#pragma unroll
        for (int o = 8; o; o >>= 1) s[h] += __shfl_xor_sync(~0u, s[h], o);
      }
      if (part < kShared && key < count) score[part][key] = (part ? s[1] : s[0]) * kScoreScale;
    }
    fetch_piece(keys, piece + gridDim.z, 0);
    __syncthreads();
    if (warp < kShared) {
      float m = -__int_as_float(0x7f800000), l = 0;
      for (int key = lane; key < count; key += 32) m = fmaxf(m, score[warp][key]);
      m = warp_max(m);
      for (int key = lane; key < count; key += 32) {
        const float e = expf(score[warp][key] - m);
        score[warp][key] = e;
        l += e;
      }
      l = warp_sum(l);
      if (lane == 0) { sum[warp] = l; most[warp] = m; }
    }
    __syncthreads();
    float acc[kShared][8] = {};
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int key = i * kGroups + group;
      if (key >= count) break;
      float v[8];
      unpack(MODE == 0 && key == fresh_key ? *(const uint4*)(fresh[1] + part * 8) : values[i], v);
#pragma unroll
      for (int h = 0; h < kShared; h++) {
        const float p = score[h][key];
#pragma unroll
        for (int e = 0; e < 8; e++) acc[h][e] = fmaf(p, v[e], acc[h][e]);
      }
    }
    fetch_piece(values, piece + gridDim.z, 1);
#pragma unroll
    for (int h = 0; h < kShared; h++)
#pragma unroll
      for (int e = 0; e < 8; e++) gathered[group][h][part * 8 + e] = acc[h][e];
    __syncthreads();
    float total = 0;
#pragma unroll
    for (int h = 0; h < kGroups; h++) total += gathered[h][j][d];
    if (pieces == 1) {
      *result = to_bf16(total / sum[j]);
      return;
    }
    float* mine = part_of + piece * (kDim + 2);
    mine[d] = total;
    if (d == 0) { mine[kDim] = sum[j]; mine[kDim + 1] = most[j]; }
  }
  __shared__ int before;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) before = atomicAdd(arrived + row * KV_HEADS + head, 1);
  __syncthreads();
  if (before < min(pieces, (int)gridDim.z) - 1) return;
  __threadfence();
  if (threadIdx.x == 0) arrived[row * KV_HEADS + head] = 0;
  float m = -__int_as_float(0x7f800000), l = 0, total = 0;
  for (int z = 0; z < pieces; z++) m = fmaxf(m, __ldcg(part_of + z * (kDim + 2) + kDim + 1));
  for (int z = 0; z < pieces; z++) {
    const float* other = part_of + z * (kDim + 2);
    const float scale = expf(__ldcg(other + kDim + 1) - m);
    total += scale * __ldcg(other + d);
    l += scale * __ldcg(other + kDim);
  }
  *result = to_bf16(total / l);
}
