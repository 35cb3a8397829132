// Calls a kernel with its arguments: buffers from the tables, the rest from what the thread knows of itself.
#pragma once
#include "atomic.h"

namespace msl {

// In the order of kernels.py's SOURCES.
enum Source {
  BUFFER,
  GROUP_BUFFER,
  POSITION_IN_GRID,
  POSITION_IN_GROUP,
  GROUP_IN_GRID,
  GROUP_SIZE,
  DISPATCHED_GROUP_SIZE,
  GRID_SIZE,
  GROUPS_IN_GRID,
  LANE,
  SIMDGROUP,
  INDEX_IN_GROUP,
  SIMDGROUPS,
  SIMD_WIDTH
};

inline Uint3 builtin(const Context& c, int source) {
  switch (source) {
    case POSITION_IN_GRID: return c.position_in_grid;
    case POSITION_IN_GROUP: return c.position_in_group;
    case GROUP_IN_GRID: return c.group_in_grid;
    case GROUP_SIZE: return c.group_size;
    case DISPATCHED_GROUP_SIZE: return c.dispatched_group_size;
    case GRID_SIZE: return c.grid_size;
    case GROUPS_IN_GRID: return c.groups_in_grid;
    case LANE: return {c.lane, 0, 0};
    case SIMDGROUP: return {c.simdgroup, 0, 0};
    case INDEX_IN_GROUP: return {c.index_in_group, 0, 0};
    case SIMDGROUPS: return {c.simdgroups, 0, 0};
    default: return {32, 0, 0};
  }
}

// Letters of element types, as launch.py compares them with a tensor's; '?': anything goes.
template <class T> constexpr char letter() {
  using namespace std;
  if constexpr (is_same_v<T, half>) return 'h';
  else if constexpr (is_same_v<T, bfloat>) return 'b';
  else if constexpr (is_same_v<T, float>) return 'f';
  else if constexpr (is_integral_v<T>) return "?1248"[sizeof(T) > 4 ? 4 : sizeof(T) > 2 ? 3 : sizeof(T)];
  else return '?';
}

struct Parameter {
  int kind;      // 0 by value, 1 pointer, 2 reference
  size_t bytes;  // of what a reference needs
  char element;  // of what a pointer points to
};

template <class T> struct Argument {
  static constexpr Parameter parameter{0, 0, '?'};
  static T get(const Context& c, int source, int) {
    const Uint3 u = builtin(c, source);
    if constexpr (metal::length_of<T> == 0) {
      return (T)u.x;
    } else {
      const uint s[3] = {u.x, u.y, u.z};
      T t;
      for (int i = 0; i < metal::length_of<T>; i++) t.d[i] = (metal::element_of<T>)s[i];
      return t;
    }
  }
};
template <class T> struct Argument<T*> {
  static constexpr Parameter parameter{1, 0, letter<std::remove_cv_t<T>>()};
  static T* get(const Context& c, int source, int i) {
    return (T*)(source == GROUP_BUFFER ? c.group_buffers[i] : c.buffers[i]);
  }
};
template <class T> struct Argument<T&> {
  static constexpr Parameter parameter{2, sizeof(T), letter<std::remove_cv_t<T>>()};
  static T& get(const Context& c, int source, int i) { return *Argument<T*>::get(c, source, i); }
};

template <class... T, size_t... I>
inline void invoke(void (*kernel)(T...), const Context& c, const int (*binding)[2],
                   std::index_sequence<I...>) {
  kernel(Argument<T>::get(c, binding[I][0], binding[I][1])...);
}
template <class... T> inline void invoke(void (*kernel)(T...), const Context& c, const int (*binding)[2]) {
  invoke(kernel, c, binding, std::index_sequence_for<T...>());
}
template <class... T> inline int describe(void (*)(T...), Parameter* out) {
  ((*out++ = Argument<T>::parameter), ...);
  return sizeof...(T);
}

}  // namespace msl
