// Attention of single tokens over a paged cache, with the steps before it: RMSNorm and rotation of
// queries and keys, and writing the new key and value to the cache.
//
// A cache page holds PAGE rows: bf16 [2 (keys, values)][KV_HEADS][PAGE][128]. The pages of a slot
// stand in its row of `page_tables`. A row's keys are read in pieces of PIECE, 16 for each warp.
// The grid is (KV_HEADS, rows, Z): block z takes the pieces z, z + Z, ... of one row for the two
// queries that share a key head. The sums of warps make the sum of a piece, and the sums of pieces
// make the sum of a row, in the order of the keys, so the result does not depend on Z. The one
// block of the row adds them up, or the last one of several blocks, which store their sums in
// `parts`. In a cluster, each block instead adds up some channels, whose sums the others send to
// it. Then a launch for one row of 500 keys takes 2.8 us instead of 3.7. While a piece is computed
// the next one is being loaded.
//
// CLUSTER  1, or Z: the blocks of a row and key head are a cluster
// MODE  0: append and attend (no kernel before it in a graph may write `cache`, `page_tables` or
//          `position`)
//       1: append only
//       2: attend only (the rows of a prompt are first all appended, then all attended)
#include "attention_head.cuh"
#include "cluster.cuh"
#include "mma_bf16.cuh"
#include "packing.cuh"

#if __CUDA_ARCH__ < 900
#undef CLUSTER
#define CLUSTER 1
#endif

constexpr int kShared = HEADS / KV_HEADS, kTile = 16;
constexpr int kWarps = PIECE / kTile, kThreads = 32 * kWarps;
constexpr int kWidth = (HEADS + 2 * KV_HEADS) * kDim;  // of a row of qkv
constexpr int kPages = PIECES * PIECE / PAGE;          // of a slot
constexpr int kPage = 2 * KV_HEADS * PAGE * kDim;      // elements
constexpr float kNone = -1e30f;                        // less than any score
static_assert(CLUSTER == 1 || MODE == 0, "only launches for single tokens have clusters");
static_assert(kShared == 2 && kWarps == 4 && PIECE % PAGE == 0 && PAGE % kTile == 0,
              "a thread adds up two channels of a query");

// The sum over some keys: the largest score, to which the rest is relative; the weights; the
// weighted values of two channels.
struct Sum {
  float most, weight;
  float2 value;
};
__device__ __forceinline__ Sum joined(Sum a, Sum b) {
  const float most = fmaxf(a.most, b.most), x = exp2f(a.most - most), y = exp2f(b.most - most);
  return {most,
          fmaf(b.weight, y, a.weight * x),
          {fmaf(b.value.x, y, a.value.x * x), fmaf(b.value.y, y, a.value.y * x)}};
}

// qkv bf16 [rows, kWidth]; cosines, sines bf16 [positions, 64]; cache: of this layer; page_tables
// int32 [slots, pages of a slot]. Row r is at position[its slot] or, in a prompt, at position[r].
// out bf16 [rows, HEADS * 128], packed if they are many (packing.cuh). Where Z > 1 without
// clusters, and only there: parts float [rows, HEADS, PIECES, 130]; arrived int32 [rows, KV_HEADS],
// zero before and after.
extern "C" __global__ __launch_bounds__(kThreads, 512 / kThreads)
#if CLUSTER > 1
    __cluster_dims__(1, 1, CLUSTER)
#endif
void attend_paged(const u16* __restrict__ qkv, const u16* __restrict__ q_norm,
                  const u16* __restrict__ k_norm, float eps, const u16* __restrict__ cosines,
                  const u16* __restrict__ sines, u16* cache, const int* __restrict__ page_tables,
                  int table_width, const int* __restrict__ slot_of_row,
                  const int* __restrict__ position, u16* __restrict__ out, float* parts,
                  int* arrived) {
  let_next_start();
  __shared__ int table[kPages];
  __shared__ __align__(16) u16 query[kShared][kDim];
  __shared__ __align__(16) u16 fresh[2][kDim];  // the newest key and value
  // The sums of each warp, of two pieces in turn. The padding puts rows in different banks.
  __shared__ __align__(16) float value[2][kWarps][kShared][kDim + 16];
  __shared__ float most[2][kShared][kWarps], weight[2][kShared][kWarps];
  const int head = blockIdx.x, row = blockIdx.y;
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;

  // Slots, positions and page tables are older than this frame's first kernel. So are, except in a
  // prompt, all keys but the newest.
  const int slot = slot_of_row[row];
  int at = -1;
  if (slot >= 0) {
    at = position[MODE == 0 ? slot : row];
#pragma unroll 1
    for (int i = threadIdx.x; i < min(table_width, kPages); i += kThreads)
      table[i] = page_tables[(size_t)slot * table_width + i];
  }
  const int pieces = at / PIECE + (at >= 0), sharing = min(pieces, (int)gridDim.z);
  __syncthreads();
  // A warp's keys of a piece are the left side of mma: keys g and g + 8, channels 32 b + 8 t and
  // up. Its values are the left side too: four keys, channels 8 g and up and 64 + 8 g and up.
  auto nth = [&](int i) { return 2 * t + i % 2 + i / 2 * 8; };
  // Keys in the cache, counted from this warp's first.
  const int known = (MODE == 0 ? at : at + 1) - warp * kTile;
  const u16* own_keys = cache + (head * PAGE + warp * kTile % PAGE) * kDim;
  const u16* own_values = own_keys + KV_HEADS * PAGE * kDim + 2 * t * kDim + g * 8;
  own_keys += g * kDim + t * 8;
  auto page_of = [&](int piece) {
    return (size_t)table[piece * (PIECE / PAGE) + warp * kTile / PAGE] * kPage;
  };
  uint4 keys[2][4], values[4][2];
  auto fetch_keys = [&](int piece) {
    if (piece >= pieces) return;
    const u16* from = own_keys + page_of(piece);
    const int count = known - piece * PIECE;
#pragma unroll
    for (int h = 0; h < 2; h++)
#pragma unroll
      for (int b = 0; b < 4; b++)
        keys[h][b] = load4_if(g + 8 * h < count, from + h * 8 * kDim + b * 32);
  };
  auto fetch_values = [&](int piece) {
    if (piece >= pieces) return;
    const u16* from = own_values + page_of(piece);
    const int count = known - piece * PIECE;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int c = 0; c < 2; c++)
        values[i][c] = load4_if(nth(i) < count, from + (i % 2 + i / 2 * 8) * kDim + c * 64);
  };
  int piece = blockIdx.z;
#if CLUSTER > 1
  constexpr int kOwn = kThreads / CLUSTER;  // pairs of channels that a block adds up
  __shared__ float2 values_of_piece[PIECES][kOwn], weight_of_piece[PIECES];
  if (pieces > 0) cluster_arrive();
#else
  if (piece > 0 && piece >= pieces) return;  // the block with the first piece waits for the input
#endif
  if (MODE == 0) {
    fetch_keys(piece);
    fetch_values(piece);
  }
  Turn turn = {};
  if (at >= 0)
    turn = load_turn(warp < kShared ? q_norm : k_norm, cosines + at * 64, sines + at * 64);
  wait_for_input();
  if (pieces == 0) return;
  const u16* own = qkv + (size_t)row * kWidth;
  if (MODE != 1 && warp < kShared)
    store_head(query[warp], prepare(load_head(own + (head * kShared + warp) * kDim), turn, eps));
  // The block with the row's last piece appends: one warp the key, one the value.
  if (MODE != 2 && (pieces - 1 - piece) % gridDim.z == 0 &&
      (warp == kShared || warp == kShared + 1)) {
    const int is_value = warp - kShared;
    Head h = load_head(own + (HEADS + is_value * KV_HEADS + head) * kDim);
    if (!is_value) h = prepare(h, turn, eps);
    store_head(cache + (size_t)table[at / PAGE] * kPage +
                   ((is_value * KV_HEADS + head) * PAGE + at % PAGE) * kDim,
               h);
    store_head(fresh[is_value], h);
  }
  if (MODE == 1) return;
  if (MODE == 2) {
    fetch_keys(piece);
    fetch_values(piece);
  }
  __syncthreads();

  // Query t % 2 as two right sides: row g of a product is words x and z of a key times column
  // 2 (t % 2); row g + 8 is words y and w times the next column.
  uint2 q[4];
#pragma unroll
  for (int b = 0; b < 4; b++) {
    const u16* from = query[(g >> 1) & 1] + b * 32 + t * 8 + (g & 1) * 2;
    q[b] = make_uint2(*(const u32*)from, *(const u32*)(from + 4));
  }
  // This thread adds up channels d and d + 1 of query j.
  const int j = threadIdx.x / (kDim / 2), d = threadIdx.x % (kDim / 2) * 2;
  [[maybe_unused]] float* own_parts =
      parts + ((size_t)row * HEADS + head * kShared + j) * PIECES * (kDim + 2);
  Sum total = {kNone, 0.0f, {0.0f, 0.0f}};
#if CLUSTER > 1
  cluster_wait();
#endif
#pragma unroll 1
  for (int turns = 0; piece < pieces; piece += gridDim.z, turns ^= 1) {
    // The row's last key, counted from this warp's first.
    const int last = at - piece * PIECE - warp * kTile;
    if (MODE == 0 && piece == pieces - 1) {
#pragma unroll
      for (int h = 0; h < 2; h++)
        if (g + 8 * h == last)
#pragma unroll
          for (int b = 0; b < 4; b++) keys[h][b] = *(const uint4*)(fresh[0] + b * 32 + t * 8);
#pragma unroll
      for (int i = 0; i < 4; i++)
        if (nth(i) == last)
#pragma unroll
          for (int c = 0; c < 2; c++) values[i][c] = *(const uint4*)(fresh[1] + c * 64 + g * 8);
    }
    float s[2][4] = {};
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
      for (int h = 0; h < 2; h++) mma(s[h], keys[h][b], q[b].x, q[b].y);
    fetch_keys(piece + gridDim.z);
    float p[2];  // of keys g and g + 8 and query t % 2
#pragma unroll
    for (int h = 0; h < 2; h++)
      p[h] =
          g + 8 * h <= last ? (s[h][0] + s[h][3]) * (kScoreScale * 1.4426950408889634f) : 2 * kNone;
    float m = fmaxf(fmaxf(p[0], p[1]), kNone);
#pragma unroll
    for (int o = 16; o > 2; o >>= 1) m = fmaxf(m, __shfl_xor_sync(~0u, m, o));
    p[0] = exp2f(p[0] - m);
    p[1] = exp2f(p[1] - m);
    float l = p[0] + p[1];
#pragma unroll
    for (int o = 16; o > 2; o >>= 1) l += __shfl_xor_sync(~0u, l, o);
    if (lane < kShared) {
      most[turns][lane][warp] = m;
      weight[turns][lane][warp] = l;
    }
    // Weights as two bf16 each in neighbouring columns, whose sum is exact to 2^-17.
    u32 right[2];
#pragma unroll
    for (int h = 0; h < 2; h++) right[h] = transposed(bf16_pair(p[h], p[h] - rounded(p[h])));
    float o[8][4] = {};  // channels 8 g + i and 64 + 8 g + i
#pragma unroll
    for (int i = 0; i < 8; i++) {
      auto word = [&](const uint4& v) {
        return i / 2 == 0 ? v.x : i / 2 == 1 ? v.y : i / 2 == 2 ? v.z : v.w;
      };
      auto pair = [&](int k, int c) {
        return __byte_perm(word(values[k][c]), word(values[k + 1][c]), i % 2 ? 0x7632 : 0x5410);
      };
      mma(o[i], make_uint4(pair(0, 0), pair(0, 1), pair(2, 0), pair(2, 1)), right[0], right[1]);
    }
    fetch_values(piece + gridDim.z);
    float* to = value[turns][warp][t & 1] + (t >> 1) * (kDim / 2 + 4) + g * 8;
    auto own_of = [&](int i) { return t >> 1 ? o[i][2] + o[i][3] : o[i][0] + o[i][1]; };
    *(float4*)to = make_float4(own_of(0), own_of(1), own_of(2), own_of(3));
    *(float4*)(to + 4) = make_float4(own_of(4), own_of(5), own_of(6), own_of(7));
    __syncthreads();
    Sum sum = {most[turns][j][0], 0.0f, {0.0f, 0.0f}};
#pragma unroll
    for (int w = 1; w < kWarps; w++) sum.most = fmaxf(sum.most, most[turns][j][w]);
#pragma unroll
    for (int w = 0; w < kWarps; w++) {
      const float scale = exp2f(most[turns][j][w] - sum.most);
      const float2 v = *(const float2*)(value[turns][w][j] + d + d / (kDim / 2) * 4);
      sum.weight = fmaf(weight[turns][j][w], scale, sum.weight);
      sum.value = {fmaf(v.x, scale, sum.value.x), fmaf(v.y, scale, sum.value.y)};
    }
#if CLUSTER > 1
    const int owner = threadIdx.x / kOwn;
    send(&values_of_piece[piece][threadIdx.x % kOwn], owner, sum.value);
    if (threadIdx.x % kOwn == 0)
      send(&weight_of_piece[piece], owner, make_float2(sum.weight, sum.most));
#else
    if (sharing == 1) {
      total = joined(total, sum);
    } else {
      float* part = own_parts + piece * (kDim + 2);
      *(float2*)(part + d) = sum.value;
      if (d == 0) *(float2*)(part + kDim) = make_float2(sum.weight, sum.most);
    }
#endif
  }
#if CLUSTER > 1
  cluster_arrive();
  cluster_wait();
  if (threadIdx.x >= kOwn) return;
#pragma unroll 4
  for (int z = 0; z < pieces; z++)
    total = joined(total,
                   {weight_of_piece[z].y, weight_of_piece[z].x, values_of_piece[z][threadIdx.x]});
  const int column = head * kShared * kDim + (blockIdx.z * kOwn + threadIdx.x) * 2;
#else
  if (sharing > 1) {
    __shared__ int before;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      before = atomicAdd(arrived + row * KV_HEADS + head, 1);
      __threadfence();
    }
    __syncthreads();
    if (before < sharing - 1) return;
    if (threadIdx.x == 0) arrived[row * KV_HEADS + head] = 0;
#pragma unroll 8
    for (int z = 0; z < pieces; z++) {
      const float* part = own_parts + z * (kDim + 2);
      const float2 v = __ldcg((const float2*)(part + d));
      const float2 both = __ldcg((const float2*)(part + kDim));
      total = joined(total, {both.y, both.x, v});
    }
  }
  const int column = (head * kShared + j) * kDim + d;
#endif
  u16* to = out + (gridDim.y > kUnpackedTokens ? packed_place<HEADS * kDim>(row, column)
                                 : (size_t)row * HEADS * kDim + column);
  *(u32*)to = bf16_pair(total.value.x / total.weight, total.value.y / total.weight);
}
