// A decode step of a Llama-style or Gemma 3 trunk in fp32 on a CPU, the counterpart of `fused_layers.FusedTrunk`, and
// its products and log-probs for other passes. Weights may be stored in bf16, of which half as many bytes are read.
// Their values are exact in fp32.
//
// `library.py` compiles this file, and `trunk.py` calls `realign_decode` with raw pointers, so it
// needs no headers of torch. A row's result depends only on this row: every sum has a fixed order, which is the same
// for any number of rows and threads. Threads divide the columns of a product, so that each reads a part of the weights.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES
#endif

namespace {

// WIDTH vectors of LANES floats by HEIGHT rows of sums fit the registers of the instruction set.
#if defined(__AVX512F__)
constexpr int LANES = 16, WIDTH = 4, HEIGHT = 6;
#elif defined(__AVX__)
constexpr int LANES = 8, WIDTH = 2, HEIGHT = 6;
#elif defined(__aarch64__)
constexpr int LANES = 4, WIDTH = 4, HEIGHT = 6;
#else
constexpr int LANES = 4, WIDTH = 2, HEIGHT = 6;
#endif

// Weights are stored by panels of so many columns: a product reads each panel from its start to its end.
constexpr int64_t PANEL = 64;
// Inputs summed before the next rows, so that a part of a panel stays in the cache for all rows.
constexpr int64_t DEPTH = 256;
// Distance in inputs between the weights that are multiplied and those that are fetched.
constexpr int64_t AHEAD = 24;

typedef float Vec __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t IVec __attribute__((vector_size(LANES * sizeof(int32_t))));

// A number in bf16: the upper half of a float.
struct Half {
    uint16_t bits;
};

inline Vec load(const float* p) {
    Vec v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline Vec load(const Half* p) {
#if defined(__AVX512F__)  // GCC widens sixteen numbers in two halves, which took a fifth of a product
    const __m256i h = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16);
#else
    typedef uint16_t Halves __attribute__((vector_size(LANES * sizeof(uint16_t))));
    Halves h;
    std::memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, IVec) << 16);
#endif
}

inline float value(float x) { return x; }

inline float value(Half x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float y;
    std::memcpy(&y, &bits, sizeof y);
    return y;
}

inline void store(float* p, Vec v) { std::memcpy(p, &v, sizeof v); }

inline Vec spread(float x) { return x - Vec{}; }

// a * b + c with one rounding. Said explicitly, since compilers do it in one instance of a template and not in another
// (GCC for AMD, where a sum depends on the one before), and rows must not depend on how many there are.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

// The same for the columns that fill no vector: which ones depends on the number of threads.
inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return std::fma(a, b, c);
#else
    return a * b + c;
#endif
}

inline float sum(Vec v) {
    float x[LANES];
    std::memcpy(x, &v, sizeof v);
    for (int step = LANES / 2; step > 0; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}

inline Vec select(IVec where, Vec a, Vec b) { return (Vec)((where & (IVec)a) | (~where & (IVec)b)); }

// exp with a relative error of about 1e-7; arguments are limited to the range without infinities and denormals.
inline Vec exponential(Vec x) {
    x = select(x < -87.0f, spread(-87.0f), x);
    x = select(x > 88.0f, spread(88.0f), x);
    // Reduction and polynomial of Cephes' expf. ln 2 has two parts: 355 / 512, whose product with n is exact, and the
    // rest.
    const Vec shifted = x * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to an integer
    const Vec n = shifted - 12582912.0f;
    Vec r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    const Vec y = p * r * r + r + 1.0f;
    const IVec power = ((IVec)shifted - (IVec)spread(12582912.0f) + 127) << 23;
    return y * (Vec)power;
}

// Adds a[R, depth] * w[depth, W * LANES] to c[R, W * LANES], where w is in a panel. The product is summed first, which
// rounds less.
template <int R, int W, typename T>
inline void tile(const float* a, int64_t lda, const T* w, float* c, int64_t ldc, int64_t depth) {
    Vec sums[R][W] = {};
    for (int64_t k = 0; k < depth; k++, w += PANEL) {
        Vec weights[W];
        for (int j = 0; j < W; j++) {
            __builtin_prefetch(w + AHEAD * PANEL + j * LANES);
            weights[j] = load(w + j * LANES);
        }
        for (int r = 0; r < R; r++) {
            const Vec x = spread(a[r * lda + k]);
            for (int j = 0; j < W; j++) sums[r][j] = multiply_add(x, weights[j], sums[r][j]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int j = 0; j < W; j++) store(c + r * ldc + j * LANES, load(c + r * ldc + j * LANES) + sums[r][j]);
}

// The same for `columns` columns of a panel.
template <int R, typename T>
void add_rows(const float* a, int64_t lda, const T* w, float* c, int64_t ldc, int64_t depth, int64_t columns) {
    constexpr int WHOLE = PANEL / LANES;  // more sums at a time for one row, each of which waits for the one before
    int64_t j = 0;
    if (R == 1 && columns == PANEL) return tile<1, WHOLE>(a, lda, w, c, ldc, depth);
    for (; j + WIDTH * LANES <= columns; j += WIDTH * LANES) tile<R, WIDTH>(a, lda, w + j, c + j, ldc, depth);
    for (; j + 2 * LANES <= columns; j += 2 * LANES) tile<R, 2>(a, lda, w + j, c + j, ldc, depth);
    for (; j + LANES <= columns; j += LANES) tile<R, 1>(a, lda, w + j, c + j, ldc, depth);
    for (; j < columns; j++)
        for (int r = 0; r < R; r++) {
            float s = 0;
            for (int64_t k = 0; k < depth; k++) s = multiply_add(a[r * lda + k], value(w[k * PANEL + j]), s);
            c[r * ldc + j] += s;
        }
}

// The same for the first of `rows` rows, at most HEIGHT of them.
template <typename T>
inline void add_some(int64_t rows, const float* a, int64_t lda, const T* w, float* c, int64_t ldc, int64_t depth,
                     int64_t columns) {
    switch (rows) {
        case 1: return add_rows<1>(a, lda, w, c, ldc, depth, columns);
        case 2: return add_rows<2>(a, lda, w, c, ldc, depth, columns);
        case 3: return add_rows<3>(a, lda, w, c, ldc, depth, columns);
        case 4: return add_rows<4>(a, lda, w, c, ldc, depth, columns);
        case 5: return add_rows<5>(a, lda, w, c, ldc, depth, columns);
        default: return add_rows<HEIGHT>(a, lda, w, c, ldc, depth, columns);
    }
}

// A range of rows or columns.
struct Range {
    int64_t first, end;
};

// Threads that compute one step together.
class Team {
  public:
    explicit Team(int64_t size) : size_(size) {}

    // Waits until all threads are here. They spin first, since a thread that sleeps takes longer to wake than a product
    // takes, and sleep then, since a busy machine may not run all of them at a time.
    void meet() {
        if (size_ == 1) return;
        const int64_t now = meetings_.load();
        if (arrived_.fetch_add(1) + 1 == size_) {
            arrived_ = 0;
            std::lock_guard<std::mutex> lock(mutex_);
            meetings_ = now + 1;
            all_here_.notify_all();
            return;
        }
        for (int i = 0; i < SPINS; i++)
            if (meetings_.load() != now) return;
        std::unique_lock<std::mutex> lock(mutex_);
        all_here_.wait(lock, [&] { return meetings_.load() != now; });
    }

    // The part of `count` items of thread `index`, in blocks of `block`.
    Range part(int64_t index, int64_t count, int64_t block = 1) const {
        const int64_t blocks = (count + block - 1) / block;
        return {blocks * index / size_ * block, std::min(count, blocks * (index + 1) / size_ * block)};
    }

    // Calls `work` with the index of each thread. They are fewer if the system gives no more, which changes no bit.
    template <typename Work>
    void run(const Work& work) {
        std::vector<std::thread> others;
        {
            std::lock_guard<std::mutex> all_wait_for_the_size(mutex_);
            try {
                for (int64_t i = 1; i < size_; i++)
                    others.emplace_back([&, i] {
                        { std::lock_guard<std::mutex> wait(mutex_); }
                        work(i);
                    });
            } catch (const std::system_error&) {
                size_ = others.size() + 1;
            }
        }
        work(0);
        for (std::thread& other : others) other.join();
    }

  private:
    static constexpr int SPINS = 1 << 20;  // about a millisecond
    int64_t size_;
    std::atomic<int64_t> arrived_{0}, meetings_{0};
    std::mutex mutex_;
    std::condition_variable all_here_;
};

// Columns of which each thread gets a multiple: a tile of AMX, and half a panel, since few panels don't divide evenly.
constexpr int64_t BLOCK = 32;

#if defined(HAS_TILES)
// AMX multiplies tiles of bf16: A[16, 32] * B[32, 16], summed in fp32. A float is nearly the sum of two numbers in bf16
// (to 16 bits), whose products are summed one after the other.
constexpr int64_t TILE = 16, DEEP = 32, WIDE = 32, ROWS = 128;

// The mask of the first `count` numbers of a vector.
inline __mmask16 first_of(int64_t count) { return (1u << std::min(std::max<int64_t>(count, 0), TILE)) - 1; }

inline __m512 widen(__m256bh x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)x), 16); }

// Writes the two parts of a[rows, inputs] by tiles: [rows / 16, inputs / 32, 2, 16, 32].
void split(int64_t rows, const float* a, int64_t lda, int64_t inputs, int64_t steps, Half* to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t k = 0; k < steps * DEEP; k += TILE) {
            const __m512 x = _mm512_maskz_loadu_ps(first_of(inputs - k), a + r * lda + k);
            const __m256bh high = _mm512_cvtneps_pbh(x), low = _mm512_cvtneps_pbh(x - widen(high));
            Half* at = to + ((r / TILE * steps + k / DEEP) * 2 * TILE + r % TILE) * DEEP + k % DEEP;
            std::memcpy(at, &high, sizeof high);
            std::memcpy(at + TILE * DEEP, &low, sizeof low);
        }
}

// Writes the products of one or two tiles of rows with two tiles of columns to `sums` [2, 2, 16, 16].
template <bool TWO>
void multiply_tiles(const Half* a, const Half* w, int64_t steps, float* sums) {
    constexpr int64_t SIZE = TILE * DEEP, ROW = DEEP * sizeof(Half);
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) _tile_zero(2);
    if (TWO) _tile_zero(3);
    for (int64_t k = 0; k < steps; k++, a += 2 * SIZE, w += 2 * SIZE) {
        _tile_loadd(4, w, ROW);
        _tile_loadd(5, w + SIZE, ROW);
        for (int part = 0; part < 2; part++) {
            _tile_loadd(6, a + part * SIZE, ROW);
            _tile_dpbf16ps(0, 6, 4);
            _tile_dpbf16ps(1, 6, 5);
            if (TWO) {
                _tile_loadd(7, a + (2 * steps + part) * SIZE, ROW);
                _tile_dpbf16ps(2, 7, 4);
                _tile_dpbf16ps(3, 7, 5);
            }
        }
    }
    _tile_stored(0, sums, TILE * sizeof(float));
    _tile_stored(1, sums + TILE * TILE, TILE * sizeof(float));
    if (TWO) _tile_stored(2, sums + 2 * TILE * TILE, TILE * sizeof(float));
    if (TWO) _tile_stored(3, sums + 3 * TILE * TILE, TILE * sizeof(float));
}

// Tells the CPU the sizes of the tiles: the rows of the first and second tile of A and of sums; B is whole.
void shape_tiles(int64_t first, int64_t second) {
    struct {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    const int64_t rows[] = {first, first, second, second, TILE, TILE, first, second};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = rows[i];
        shape.bytes[i] = rows[i] ? 64 : 0;
    }
    _tile_loadconfig(&shape);
}

// c[rows, r] += a[rows, inputs] * w[inputs, r], where w is stored by tiles: [columns / 32, inputs / 32, 2, 16, 16, 2].
void add_tiles(int64_t rows, const float* a, int64_t lda, const Half* w, int64_t inputs, Range r, float* c,
               int64_t ldc) {
    const int64_t steps = (inputs + DEEP - 1) / DEEP;
    std::vector<Half> parts((std::min(rows, ROWS) + TILE - 1) / TILE * TILE * steps * DEEP * 2);
    float sums[4 * TILE * TILE];
    for (int64_t top = 0; top < rows; top += ROWS) {
        const int64_t count = std::min(rows - top, ROWS);
        split(count, a + top * lda, lda, inputs, steps, parts.data());
        for (int64_t j = r.first; j < r.end; j += WIDE)
            for (int64_t b = 0; b < count; b += 2 * TILE) {
                const int64_t first = std::min(count - b, TILE), second = std::min(count - b, 2 * TILE) - first;
                const Half *left = parts.data() + b * steps * DEEP * 2, *right = w + j * steps * DEEP;
                shape_tiles(first, second);
                if (second)
                    multiply_tiles<true>(left, right, steps, sums);
                else
                    multiply_tiles<false>(left, right, steps, sums);
                for (int64_t i = 0; i < first + second; i++)
                    for (int64_t n = 0; n < WIDE; n += TILE) {
                        float* to = c + (top + b + i) * ldc + j + n;
                        const float* from = sums + ((i / TILE * 2 + n / TILE) * TILE + i % TILE) * TILE;
                        const __mmask16 mask = first_of(r.end - j - n);
                        const __m512 before = _mm512_maskz_loadu_ps(mask, to);
                        _mm512_mask_storeu_ps(to, mask, before + _mm512_loadu_ps(from));
                    }
            }
    }
    _tile_release();
}
#endif

// c[rows, r] += a[rows, inputs] * w[inputs, r], where w is stored by panels: [columns / PANEL, inputs, PANEL].
template <typename T>
void add_panels(int64_t rows, const float* a, int64_t lda, const T* w, int64_t inputs, Range r, float* c, int64_t ldc) {
    for (int64_t j = r.first, next; j < r.end; j = next) {
        next = std::min(r.end, j / PANEL * PANEL + PANEL);
        for (int64_t k = 0; k < inputs; k += DEPTH) {
            const int64_t depth = std::min(DEPTH, inputs - k);
            const T* part = w + (j / PANEL * inputs + k) * PANEL + j % PANEL;
            for (int64_t b = 0; b < rows; b += HEIGHT)
                add_some(rows - b, a + k + b * lda, lda, part, c + b * ldc + j, ldc, depth, next - j);
        }
    }
}

// How a weight is stored; `trunk.py` has the same numbers.
enum Stored : int64_t { FLOAT, HALF, TILES };

// A weight of an output and an input is w[output * next_output + input * next_input].
struct Weight {
    const float* w;
    int64_t next_output, next_input, inputs, outputs;
};

inline float stored_as(float x, float*) { return x; }

// The nearest number in bf16, of two the even one.
inline Half stored_as(float x, Half*) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t rounded = bits + 0x7fff + (bits >> 16 & 1);
    return {uint16_t((x == x ? rounded : bits | 0x400000) >> 16)};
}

// Stores a weight by panels, those of `panels`.
template <typename T>
void store_panels(const Weight& from, Range panels, T* to) {
    constexpr int64_t PART = 64;  // inputs at a time, whose part of a panel stays in the cache
    for (int64_t panel = panels.first; panel < panels.end; panel++)
        for (int64_t k = 0; k < from.inputs; k += PART) {
            const int64_t depth = std::min(PART, from.inputs - k);
            const int64_t columns = std::min(PANEL, from.outputs - panel * PANEL);
            T part[PANEL][PART];
            for (int64_t j = 0; j < columns; j++) {
                const float* w = from.w + (panel * PANEL + j) * from.next_output + k * from.next_input;
                for (int64_t i = 0; i < depth; i++) part[j][i] = stored_as(w[i * from.next_input], (T*)nullptr);
            }
            T* at = to + (panel * from.inputs + k) * PANEL;
            for (int64_t i = 0; i < depth; i++)
                for (int64_t j = 0; j < columns; j++) at[i * PANEL + j] = part[j][i];
        }
}

#if defined(HAS_TILES)
// Stores a weight by tiles: the pairs of tiles that `panels` contain.
void store_tiles(const Weight& from, Range panels, Half* to) {
    const int64_t steps = (from.inputs + DEEP - 1) / DEEP;
    for (int64_t j = panels.first * PANEL; j < std::min(panels.end * PANEL, from.outputs); j++)
        for (int64_t k = 0; k < from.inputs; k++) {
            Half* tile = to + ((j / WIDE * steps + k / DEEP) * WIDE / TILE + j % WIDE / TILE) * TILE * DEEP;
            const float x = from.w[j * from.next_output + k * from.next_input];
            tile[(k % DEEP / 2 * TILE + j % TILE) * 2 + k % 2] = stored_as(x, (Half*)nullptr);
        }
}
#endif

// c[rows, r] += a[rows, inputs] * w[inputs, r] for the columns r.
void add_product(int64_t stored, int64_t rows, const float* a, int64_t lda, const void* w, int64_t inputs, Range r,
                 float* c, int64_t ldc) {
    if (stored == FLOAT)
        add_panels(rows, a, lda, static_cast<const float*>(w), inputs, r, c, ldc);
#if defined(HAS_TILES)
    else if (stored == TILES)
        add_tiles(rows, a, lda, static_cast<const Half*>(w), inputs, r, c, ldc);
#endif
    else
        add_panels(rows, a, lda, static_cast<const Half*>(w), inputs, r, c, ldc);
}

void start_with(int64_t rows, const float* bias, Range r, float* c, int64_t ldc) {
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = r.first; i < r.end; i++) c[b * ldc + i] = bias ? bias[i] : 0;
}

void add_bias(int64_t rows, const float* bias, Range r, float* c, int64_t ldc) {
    if (!bias) return;
    for (int64_t b = 0; b < rows; b++)
        for (int64_t i = r.first; i < r.end; i++) c[b * ldc + i] += bias[i];
}

float dot(const float* a, const float* b, int64_t n) {
    Vec sums[4] = {};
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) sums[j] += load(a + i + j * LANES) * load(b + i + j * LANES);
    for (; i + LANES <= n; i += LANES) sums[0] += load(a + i) * load(b + i);
    float total = sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
    for (; i < n; i++) total = multiply_add(a[i], b[i], total);
    return total;
}

// y = x / sqrt(|x|^2 + floor^2) * weight; `y` may be `x`
void normalize(const float* x, const float* weight, float floor, int64_t n, float* y) {
    const float scale = 1.0f / std::sqrt(dot(x, x, n) + floor * floor);
    for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

template <int W>
inline void mix(const float* weights, const float* values, int64_t size, int64_t count, float scale, float* out) {
    Vec sums[W] = {};
    for (int64_t t = 0; t < count; t++)
        for (int j = 0; j < W; j++) sums[j] += weights[t] * load(values + t * size + j * LANES);
    for (int j = 0; j < W; j++) store(out + j * LANES, sums[j] * scale);
}

// Attention of one query to `count` keys and values [count, size]; `scores` has room for count + LANES floats.
void attend(const float* query, const float* keys, const float* values, int64_t size, int64_t count, float scaling,
            float* scores, float* out) {
    float most = -INFINITY;
    for (int64_t t = 0; t < count; t++) {
        scores[t] = dot(query, keys + t * size, size) * scaling;
        most = scores[t] > most ? scores[t] : most;
    }
    const int64_t padded = (count + LANES - 1) / LANES * LANES;
    // The padding becomes exp(-87), which changes no digit of a sum whose largest term is 1.
    for (int64_t t = count; t < padded; t++) scores[t] = -INFINITY;
    Vec totals = {};
    for (int64_t t = 0; t < padded; t += LANES) {
        const Vec e = exponential(load(scores + t) - most);
        store(scores + t, e);
        totals += e;
    }
    const float scale = 1.0f / sum(totals);
    int64_t i = 0;
    for (; i + 4 * LANES <= size; i += 4 * LANES) mix<4>(scores, values + i, size, count, scale, out + i);
    for (; i + LANES <= size; i += LANES) mix<1>(scores, values + i, size, count, scale, out + i);
    for (; i < size; i++) {
        float total = 0;
        for (int64_t t = 0; t < count; t++) total = multiply_add(scores[t], values[t * size + i], total);
        out[i] = total * scale;
    }
}

// SiLU(g) * u, or GELU(g) * u by its approximation with tanh: (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z)).
inline Vec gated(Vec g, Vec u, bool gelu) {
    const Vec z = gelu ? 1.5957691216f * (g + 0.044715f * g * g * g) : g;
    return g / (1.0f + exponential(-z)) * u;
}

// gate = activation(gate) * up
void activate(float* gate, const float* up, int64_t n, bool gelu) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(gate + i, gated(load(gate + i), load(up + i), gelu));
    if (i == n) return;
    Vec g = {}, u = {};
    std::memcpy(&g, gate + i, (n - i) * sizeof(float));
    std::memcpy(&u, up + i, (n - i) * sizeof(float));
    const Vec y = gated(g, u, gelu);
    std::memcpy(gate + i, &y, (n - i) * sizeof(float));
}

// A bias or norm that the layer lacks is null. `trunk.py` has the same fields.
struct Layer {
    const float* attention_norm;
    const void* qkv;
    const float *qkv_bias, *qk_norm;
    const void* output;
    const float *output_bias, *mlp_norm;
    const void* gate_up;
    const float* gate_up_bias;
    const void* down;
    const float* down_bias;
    float *keys, *values;  // [slots, key heads, cache length, head size]
    const float *added_by_attention_norm, *added_by_mlp_norm;  // of what is added to the residual stream
    const float* turns;  // [positions, head size / 2] pairs of cosine and sine
    int64_t queries, groups, window, inner, gelu;  // query heads, key heads, sliding window or 0, size of the gate
    float attention_floor, qk_floor, mlp_floor, scaling, added_by_attention_floor, added_by_mlp_floor;
};

struct Trunk {
    const Layer* layers;
    const float *embedding, *norm;
    int64_t n_layers, hidden, head_size, cache_length, stored;  // stored: how the layers' weights are stored
    float floor, scale;
};

// Normalizes and rotates a head of a query or key in place.
void turn_head(float* y, const float* norm, float floor, const float* turn, int64_t size) {
    if (norm) normalize(y, norm, floor, size, y);
    for (int64_t d = 0; d < size; d += 2) {
        const float even = y[d], odd = y[d + 1], cosine = turn[d], sine = turn[d + 1];
        y[d] = even * cosine - odd * sine;
        y[d + 1] = even * sine + odd * cosine;
    }
}

int64_t call_scratch(const Trunk* trunk) { return trunk->cache_length + LANES; }

// The part of thread `me` of `realign_decode`.
void decode(const Trunk* trunk, int64_t rows, int64_t first_slot, int64_t slot_step, const int64_t* ids,
            const int64_t* positions, float* x, float* scratch, int64_t threads, int64_t me, Team& team) {
    const int64_t hidden = trunk->hidden, size = trunk->head_size, length = trunk->cache_length;
    float* scores = scratch + me * call_scratch(trunk);
    float* h = scratch + threads * call_scratch(trunk);
    float* work = h + rows * hidden;
    const Range mine = team.part(me, rows), out = team.part(me, hidden, BLOCK);
    const auto normalize_rows = [&](const float* weight, float floor, float* y) {
        for (int64_t b = mine.first; b < mine.end; b++)
            normalize(x + b * hidden, weight, floor, hidden, y + b * hidden);
        team.meet();
    };
    // Adds a product to the residual stream, or its norm, if the layer has one for it.
    const auto add_to_stream = [&](const float* a, int64_t lda, int64_t inputs, const void* w, const float* bias, const float* norm,
                                   float floor) {
        if (norm)
            start_with(rows, bias, out, h, hidden);
        else
            add_bias(rows, bias, out, x, hidden);
        add_product(trunk->stored, rows, a, lda, w, inputs, out, norm ? h : x, hidden);
        team.meet();
        for (int64_t b = mine.first; norm && b < mine.end; b++) {
            float *added = h + b * hidden, *y = x + b * hidden;
            normalize(added, norm, floor, hidden, added);
            for (int64_t d = 0; d < hidden; d++) y[d] += added[d];
        }
    };
    for (int64_t b = mine.first; b < mine.end; b++) {
        const float* row = trunk->embedding + ids[b] * hidden;
        for (int64_t d = 0; d < hidden; d++) x[b * hidden + d] = row[d] * trunk->scale;
    }
    for (int64_t i = 0; i < trunk->n_layers; i++) {
        const Layer& l = trunk->layers[i];
        const int64_t heads = l.queries + 2 * l.groups, outputs = heads * size, shared = l.queries / l.groups;
        float *qkv = work, *mixed = qkv + rows * outputs, *gate_up = mixed + rows * l.queries * size;
        normalize_rows(l.attention_norm, l.attention_floor, h);
        const Range joined = team.part(me, outputs, BLOCK);
        start_with(rows, l.qkv_bias, joined, qkv, outputs);
        add_product(trunk->stored, rows, h, hidden, l.qkv, hidden, joined, qkv, outputs);
        team.meet();
        const Range pairs = team.part(me, rows * l.groups);
        for (int64_t pair = pairs.first; pair < pairs.end; pair++) {
            const int64_t b = pair / l.groups, head = l.queries + pair % l.groups, p = positions[b];
            float* key = qkv + b * outputs + head * size;
            turn_head(key, l.qk_norm ? l.qk_norm + head * size : nullptr, l.qk_floor, l.turns + p * size, size);
            const int64_t at = (((first_slot + b * slot_step) * l.groups + pair % l.groups) * length + p) * size;
            std::memcpy(l.keys + at, key, size * sizeof(float));
            std::memcpy(l.values + at, key + l.groups * size, size * sizeof(float));
        }
        team.meet();  // since the rows of one text attend to each other's keys
        for (int64_t pair = pairs.first; pair < pairs.end; pair++) {
            const int64_t b = pair / l.groups, g = pair % l.groups, p = positions[b];
            const int64_t from = l.window > 0 && p >= l.window ? p - l.window + 1 : 0;
            const int64_t at = (((first_slot + b * slot_step) * l.groups + g) * length + from) * size;
            for (int64_t n = g * shared; n < (g + 1) * shared; n++) {
                float* q = qkv + b * outputs + n * size;
                turn_head(q, l.qk_norm ? l.qk_norm + n * size : nullptr, l.qk_floor, l.turns + p * size, size);
                attend(q, l.keys + at, l.values + at, size, p + 1 - from, l.scaling, scores,
                       mixed + (b * l.queries + n) * size);
            }
        }
        team.meet();
        const int64_t width = l.queries * size;
        add_to_stream(mixed, width, width, l.output, l.output_bias, l.added_by_attention_norm,
                      l.added_by_attention_floor);
        normalize_rows(l.mlp_norm, l.mlp_floor, h);
        const Range gate = team.part(me, l.inner, BLOCK), up = {l.inner + gate.first, l.inner + gate.end};
        for (const Range& r : {gate, up}) {
            start_with(rows, l.gate_up_bias, r, gate_up, 2 * l.inner);
            add_product(trunk->stored, rows, h, hidden, l.gate_up, hidden, r, gate_up, 2 * l.inner);
        }
        for (int64_t b = 0; b < rows; b++) {
            float* g = gate_up + b * 2 * l.inner + gate.first;
            activate(g, g + l.inner, gate.end - gate.first, l.gelu);
        }
        team.meet();
        add_to_stream(gate_up, 2 * l.inner, l.inner, l.down, l.down_bias, l.added_by_mlp_norm, l.added_by_mlp_floor);
    }
    normalize_rows(trunk->norm, trunk->floor, x);
}

}  // namespace

extern "C" {

// Number of floats that a step needs as scratch memory.
int64_t realign_scratch(const Trunk* trunk, int64_t rows, int64_t threads) {
    int64_t most = 0;
    for (int64_t i = 0; i < trunk->n_layers; i++) {
        const Layer& l = trunk->layers[i];
        most = std::max(most, (2 * l.queries + 2 * l.groups) * trunk->head_size + 2 * l.inner);
    }
    return rows * (most + trunk->hidden) + threads * call_scratch(trunk);
}

// Writes the last hidden states of one new token per row to `x` [rows, hidden], and its keys and values to the cache.
// Row b is in slot first_slot + b * slot_step. With a step of 0 the rows are tokens of one text, by position.
void realign_decode(const Trunk* trunk, int64_t rows, int64_t first_slot, int64_t slot_step, const int64_t* ids,
                    const int64_t* positions, float* x, float* scratch, int64_t threads) {
    Team team(threads);
    team.run([&](int64_t me) {
        decode(trunk, rows, first_slot, slot_step, ids, positions, x, scratch, threads, me, team);
    });
}

// Whether weights can be stored by tiles: the CPU has AMX, and the system lets this process use it.
int64_t realign_has_tiles() {
#if defined(HAS_TILES)
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

// Stores a weight as `stored` says. Outputs and inputs that only fill panels or tiles up are left as they are.
void realign_store(const float* w, int64_t next_output, int64_t next_input, int64_t inputs, int64_t outputs, void* to,
                   int64_t stored, int64_t threads) {
    const Weight from{w, next_output, next_input, inputs, outputs};
    Team team(threads);
    team.run([&](int64_t me) {
        const Range panels = team.part(me, (outputs + PANEL - 1) / PANEL);
        if (stored == FLOAT) return store_panels(from, panels, static_cast<float*>(to));
#if defined(HAS_TILES)
        if (stored == TILES) return store_tiles(from, panels, static_cast<Half*>(to));
#endif
        store_panels(from, panels, static_cast<Half*>(to));
    });
}

// c[rows, columns] = a[rows, inputs] * w[inputs, columns]
void realign_product(int64_t rows, const float* a, const void* w, int64_t inputs, int64_t columns, float* c,
                     int64_t stored, int64_t threads) {
    Team team(threads);
    team.run([&](int64_t me) {
        const Range r = team.part(me, columns, BLOCK);
        start_with(rows, nullptr, r, c, columns);
        add_product(stored, rows, a, inputs, w, inputs, r, c, columns);
    });
}

// Whether the CPU has vectors that MKL, with which torch multiplies in fp32, uses on CPUs of Intel only.
int64_t realign_has_wider_vectors() {
#if defined(__AVX512F__)
    __builtin_cpu_init();
    return __builtin_cpu_is("amd") != 0;
#else
    return 0;
#endif
}

// Log-probs of one token per row under the softmax of `logits` [rows, words], and the log-sum-exp of each row.
void realign_logprobs(int64_t rows, const float* logits, int64_t words, const int64_t* tokens, float* logprobs,
                      float* normalizers) {
    for (int64_t b = 0; b < rows; b++, logits += words) {
        float most = -INFINITY;
        for (int64_t i = 0; i < words; i++) most = logits[i] > most ? logits[i] : most;
        Vec totals = {};
        int64_t i = 0;
        for (; i + LANES <= words; i += LANES) totals += exponential(load(logits + i) - most);
        if (i < words) {
            Vec rest = spread(-INFINITY);
            std::memcpy(&rest, logits + i, (words - i) * sizeof(float));
            totals += exponential(rest - most);
        }
        const float size = std::log(sum(totals));
        logprobs[b] = logits[tokens[b]] - most - size;
        normalizers[b] = most + size;
    }
}

}  // extern "C"
