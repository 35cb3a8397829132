// Address spaces, scalar types, limits, type traits.
#pragma once
#include <type_traits>
#include <utility>

#include "../abi.h"

// On a host there is one address space. emulator/lint.py looks at what that hides.
#define device
#define constant
#define thread
#define threadgroup
#define METAL_FUNC inline __attribute__((always_inline))
#define METAL_CONST static constexpr

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

// bfloat16 with its own rounding (to nearest, ties to even); arithmetic in float, rounded once.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class T, std::enable_if_t<std::is_arithmetic_v<T> || std::is_same_v<T, half>, int> = 0>
  constexpr bfloat(T value) : bits(round((float)value)) {}
  constexpr operator float() const { return __builtin_bit_cast(float, (uint32_t)bits << 16); }
  bfloat& operator+=(bfloat o) { return *this = bfloat((float)*this + (float)o); }
  bfloat& operator-=(bfloat o) { return *this = bfloat((float)*this - (float)o); }
  bfloat& operator*=(bfloat o) { return *this = bfloat((float)*this * (float)o); }
  bfloat& operator/=(bfloat o) { return *this = bfloat((float)*this / (float)o); }

 private:
  static constexpr uint16_t round(float value) {
    const uint32_t u = __builtin_bit_cast(uint32_t, value);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(u >> 16 | 0x40u);
    return (uint16_t)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
  }
};
#define MSL_BFLOAT_OP(OP) \
  inline bfloat operator OP(bfloat a, bfloat b) { return bfloat((float)a OP(float) b); }
MSL_BFLOAT_OP(+)
MSL_BFLOAT_OP(-)
MSL_BFLOAT_OP(*)
MSL_BFLOAT_OP(/)
inline bfloat operator-(bfloat a) { return bfloat(-(float)a); }

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX 3.40282346638528859812e+38f
#define FLT_MIN 1.17549435e-38f
#define FLT_EPSILON 1.1920928955078125e-7f
#define HALF_MAX ((half)65504.f)
#define HALF_MIN ((half)6.103515625e-5f)
#define HALF_EPSILON ((half)9.765625e-4f)
#define MAXFLOAT FLT_MAX
#define MAXHALF HALF_MAX
#define M_E_F 2.71828174591064f
#define M_PI_F 3.14159274101257f
#define M_PI_2_F 1.57079637050629f
#define M_LOG2E_F 1.44269502162933f
#define M_LN2_F 0.693147182464600f
#define M_SQRT2_F 1.41421353816986f
#define M_SQRT1_2_F 0.707106769084930f
#define M_2_SQRTPI_F 1.12837922573090f

namespace metal {

using std::bool_constant, std::conditional, std::conditional_t, std::decay_t, std::declval, std::enable_if,
    std::enable_if_t, std::false_type, std::integral_constant, std::is_arithmetic, std::is_const_v,
    std::is_convertible, std::is_convertible_v, std::is_enum, std::is_integral, std::is_integral_v,
    std::is_pointer_v, std::is_same, std::is_same_v, std::is_signed, std::is_signed_v, std::is_unsigned,
    std::is_unsigned_v, std::is_void, std::is_void_v, std::make_unsigned_t, std::remove_const_t,
    std::remove_cv_t, std::remove_reference_t, std::true_type;

template <class T> using remove_addrspace_t = T;
template <class T> struct remove_addrspace {
  typedef T type;
};
template <class T>
inline constexpr bool is_floating_point_v = is_same_v<T, float> || is_same_v<T, half> || is_same_v<T, bfloat>;
template <class T> struct is_floating_point : bool_constant<is_floating_point_v<remove_cv_t<T>>> {};
template <class T>
inline constexpr bool is_scalar_v =
    is_integral_v<T> || is_floating_point_v<T> || is_same_v<T, double> || std::is_enum_v<T>;
template <class T> inline constexpr bool is_arithmetic_v = is_scalar_v<T>;

template <class T> struct numeric_limits;
#define MSL_LIMITS(T, MIN, MAX, LOWEST, INF, EPSILON) \
  template <> struct numeric_limits<T> {              \
    static constexpr T min() { return MIN; }          \
    static constexpr T max() { return MAX; }          \
    static constexpr T lowest() { return LOWEST; }    \
    static constexpr T infinity() { return INF; }     \
    static constexpr T epsilon() { return EPSILON; }  \
    static constexpr T quiet_NaN() { return (T)NAN; } \
  };
#define MSL_INTEGER_LIMITS(T, MIN, MAX)         \
  template <> struct numeric_limits<T> {        \
    static constexpr T min() { return MIN; }    \
    static constexpr T max() { return MAX; }    \
    static constexpr T lowest() { return MIN; } \
  };
MSL_LIMITS(float, FLT_MIN, FLT_MAX, -FLT_MAX, INFINITY, FLT_EPSILON)
MSL_LIMITS(half, HALF_MIN, HALF_MAX, -HALF_MAX, (half)INFINITY, HALF_EPSILON)
MSL_LIMITS(bfloat, FLT_MIN, 3.38953139e38f, -3.38953139e38f, INFINITY, 0.0078125f)
MSL_INTEGER_LIMITS(bool, false, true)
MSL_INTEGER_LIMITS(char, -128, 127)
MSL_INTEGER_LIMITS(uchar, 0, 255)
MSL_INTEGER_LIMITS(short, -32768, 32767)
MSL_INTEGER_LIMITS(ushort, 0, 65535)
MSL_INTEGER_LIMITS(int, -2147483647 - 1, 2147483647)
MSL_INTEGER_LIMITS(uint, 0, 4294967295u)
MSL_INTEGER_LIMITS(long, -9223372036854775807L - 1, 9223372036854775807L)
MSL_INTEGER_LIMITS(ulong, 0, 18446744073709551615UL)

template <class T, size_t N> struct array {
  T values[N];
  T& operator[](size_t i) { return values[i]; }
  const T& operator[](size_t i) const { return values[i]; }
  static constexpr size_t size() { return N; }
};

template <class T, class U> inline T bits_as(const U& from) {
  static_assert(sizeof(T) == sizeof(U), "as_type: sizes differ");
  T to;
  __builtin_memcpy((void*)&to, (const void*)&from, sizeof to);
  return to;
}

}  // namespace metal

template <class T, class U> inline T as_type(const U& from) { return metal::bits_as<T>(from); }
