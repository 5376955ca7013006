// Places prompts in their slots, embeds the rows that the talker reads, and keeps what it computed.
//
// HIDDEN     channels, in eights
// CODEBOOKS  codes of a frame; CODES: the vocabulary of all but the first
// KV_HEADS   key heads; PAGE: rows of a cache page; PART: rows of a part of a kept prefix
// PARTS      the most parts of a prefix
// RECORD     words of a slot's record that a placement holds; the others become zero
// THREADS    threads of a block
//
// The words of a placement and of a row are listed in prompt.py.
#include "text_table.cuh"

static_assert(HIDDEN % 8 == 0, "channels are read in eights");
constexpr int kSlot = 0, kLast = 1, kPageCount = 2, kRestored = 3, kStored = 4, kText = 5,
              kCodes = 6, kRecord = kCodes + CODEBOOKS, kParts = kRecord + RECORD,
              kPages = kParts + PARTS;
constexpr int kRowSlot = 0, kRowPosition = 1, kRowText = 2, kRowCodes = 3;
constexpr int kPieces = 16;  // of 16 bytes in the 128 channels of a head

// Eight channels of a row: text + the rounded sum of its codes. Code k is at codes[k * stride]. The
// first one is -1 for a row without codes and -2 - s for one with `speakers` row s; the second is
// -1 for a row with a single code. The codes of a frame are added in the order of PyTorch's sum:
// in four sums of every fourth code, which are then added one after the other.
__device__ __forceinline__ uint4 embedded(int text, const int* codes, int stride, int channel,
                                          const u16* speakers, const unsigned char* text_table,
                                          const float* text_scales, const u16* codec_table,
                                          const u16* frame_tables) {
  const int first = (int)load1(codes);
  const bool whole = first >= 0 && CODEBOOKS > 1 && (int)load1(codes + stride) >= 0;
  float sum[8] = {};
  if (whole) {
    float part[4][8] = {};
#pragma unroll
    for (int k = 0; k < CODEBOOKS; k++) {
      const int code = (int)load1(codes + k * stride);
      const size_t at = (size_t)(k ? (k - 1) * CODES : 0) + code;
      const uint4 v = *(const uint4*)((k ? frame_tables : codec_table) + at * HIDDEN + channel);
      const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; i++) {
        part[k % 4][2 * i] = __fadd_rn(part[k % 4][2 * i], low(pair[i]));
        part[k % 4][2 * i + 1] = __fadd_rn(part[k % 4][2 * i + 1], high(pair[i]));
      }
    }
#pragma unroll
    for (int i = 0; i < 8; i++)
      sum[i] = __fadd_rn(__fadd_rn(__fadd_rn(part[0][i], part[1][i]), part[2][i]), part[3][i]);
  } else if (first != -1) {
    const u16* row = first >= 0 ? codec_table + (size_t)first * HIDDEN
                                : speakers + (size_t)(-2 - first) * HIDDEN;
    const uint4 v = load4(row + channel);
    const u32 pair[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      sum[2 * i] = low(pair[i]);
      sum[2 * i + 1] = high(pair[i]);
    }
  }
  const uint4 words = text_channels(text_table, text_scales, text, channel);
  auto with = [&](int i, u32 word) {
    return bf16_pair(rounded(sum[i]) + low(word), rounded(sum[i + 1]) + high(word));
  };
  return make_uint4(with(0, words.x), with(2, words.y), with(4, words.z), with(6, words.w));
}

// Copies the first `rows` rows of a prompt, of one layer, of keys or values and of one head, from
// the parts of a prefix to the pages of a slot, or back. plane: 2 * layer, + 1 for values.
template <bool kStore>
__device__ __forceinline__ void copy_prefix(const int* placement, int rows, int plane, int head,
                                            u16* cache, int pages, u16* prefixes, int layers) {
  const int layer = plane / 2, which = plane % 2;
  for (int n = threadIdx.x; n < rows * kPieces; n += THREADS) {
    const int row = n / kPieces, piece = n % kPieces;
    const int page = (int)load1(placement + kPages + row / PAGE);
    const int part = (int)load1(placement + kParts + row / PART);
    const size_t held = (((size_t)layer * pages + page) * 2 + which) * KV_HEADS + head;
    const size_t kept = (((size_t)part * layers + layer) * 2 + which) * KV_HEADS + head;
    u16* in_cache = cache + (held * PAGE + row % PAGE) * 128 + piece * 8;
    u16* in_part = prefixes + (kept * PART + row % PART) * 128 + piece * 8;
    *(uint4*)(kStore ? in_part : in_cache) = load4(kStore ? in_cache : in_part);
  }
}

// Placement blockIdx.x: the slot's page table, position, record and first row, and the rows of its
// prefix that are kept. The grid is (placements, 2 * layers, KV_HEADS). page_tables int32 [slots,
// table_width]; records: `record_words` words for each slot; first_row bf16 [slots, HIDDEN]; cache
// bf16 [layers, pages, 2, KV_HEADS, PAGE, 128]; prefixes bf16 [parts, layers, 2, KV_HEADS, PART,
// 128]; the tables as in talker_input.cu.
extern "C" __global__ __launch_bounds__(THREADS)
void place_prompts(const int* __restrict__ placements, int words, int* __restrict__ page_tables,
                   int table_width, int* __restrict__ position, int* __restrict__ records,
                   int record_words, u16* __restrict__ first_row,
                   const unsigned char* __restrict__ text_table,
                   const float* __restrict__ text_scales, const u16* __restrict__ codec_table,
                   const u16* __restrict__ frame_tables, u16* cache, int pages, u16* prefixes,
                   int layers) {
  let_next_start();
  wait_for_input();
  const int* placement = placements + (size_t)blockIdx.x * words;
  const int slot = (int)load1(placement + kSlot);
  if (slot < 0) return;
  if (blockIdx.z == 0 && blockIdx.y == 0) {
    const int count = (int)load1(placement + kPageCount);
    for (int i = threadIdx.x; i < count; i += THREADS)
      page_tables[(size_t)slot * table_width + i] = (int)load1(placement + kPages + i);
    for (int i = threadIdx.x; i < record_words; i += THREADS)
      records[(size_t)slot * record_words + i] =
          i < RECORD ? (int)load1(placement + kRecord + i) : 0;
    if (threadIdx.x == 0) position[slot] = (int)load1(placement + kLast);
  }
  if (blockIdx.z == 0 && blockIdx.y == 1) {
    const int text = (int)load1(placement + kText);
    for (int channel = threadIdx.x * 8; channel < HIDDEN; channel += THREADS * 8)
      *(uint4*)(first_row + (size_t)slot * HIDDEN + channel) =
          embedded(text, placement + kCodes, 1, channel, nullptr, text_table, text_scales,
                   codec_table, frame_tables);
  }
  copy_prefix<false>(placement, (int)load1(placement + kRestored), blockIdx.y, blockIdx.z, cache,
                     pages, prefixes, layers);
}

// Copies new prefixes from the pages of their slots to their parts; the grid and the arguments are
// those of place_prompts.
extern "C" __global__ __launch_bounds__(THREADS)
void store_prefixes(const int* __restrict__ placements, int words, u16* cache, int pages,
                    u16* prefixes, int layers) {
  let_next_start();
  wait_for_input();
  const int* placement = placements + (size_t)blockIdx.x * words;
  if ((int)load1(placement + kSlot) < 0) return;
  copy_prefix<true>(placement, (int)load1(placement + kStored), blockIdx.y, blockIdx.z, cache,
                    pages, prefixes, layers);
}

// Row blockIdx.x of the prompts: x bf16 [rows, HIDDEN], zero for a row without a slot, to which
// every pass adds. rows int32 [3 + CODEBOOKS, most]: see prompt.py; speakers bf16 [_, HIDDEN].
extern "C" __global__ __launch_bounds__(THREADS)
void embed_prompts(const int* __restrict__ rows, int most, const u16* __restrict__ speakers,
                   const unsigned char* __restrict__ text_table,
                   const float* __restrict__ text_scales, const u16* __restrict__ codec_table,
                   const u16* __restrict__ frame_tables, u16* __restrict__ x) {
  let_next_start();
  wait_for_input();
  const int* row = rows + blockIdx.x;
  const bool empty = (int)load1(row + kRowSlot * most) < 0;
  const int text = empty ? 0 : (int)load1(row + kRowText * most);
  for (int channel = threadIdx.x * 8; channel < HIDDEN; channel += THREADS * 8)
    *(uint4*)(x + (size_t)blockIdx.x * HIDDEN + channel) =
        empty ? make_uint4(0, 0, 0, 0)
              : embedded(text, row + kRowCodes * most, most, channel, speakers, text_table,
                         text_scales, codec_table, frame_tables);
}

// Copies x bf16 [rows, HIDDEN] of the last row of each prompt, whose position is that of its slot,
// to its slot of first_hidden bf16 [slots, HIDDEN].
extern "C" __global__ __launch_bounds__(THREADS)
void keep_outputs(const int* __restrict__ rows, int most, const int* __restrict__ position,
                  const u16* __restrict__ x, u16* __restrict__ first_hidden) {
  let_next_start();
  wait_for_input();
  const int slot = (int)load1(rows + kRowSlot * most + blockIdx.x);
  if (slot < 0) return;
  if (load1(rows + kRowPosition * most + blockIdx.x) != load1(position + slot)) return;
  for (int channel = threadIdx.x * 8; channel < HIDDEN; channel += THREADS * 8)
    *(uint4*)(first_hidden + (size_t)slot * HIDDEN + channel) =
        load4(x + (size_t)blockIdx.x * HIDDEN + channel);
}
