// Draws the panels of a dashboard with Grafana's own library: what a person would see, without a server.
import React from 'react';
import { createRoot } from 'react-dom/client';
import {
  applyFieldOverrides, createTheme, dateTime, FieldColorModeId, FieldType, getDisplayProcessor, toDataFrame, type DataFrame, type TimeRange,
} from '@grafana/data';
import { BigValue, BigValueColorMode, BigValueGraphMode, GlobalStyles, PanelChrome, ThemeContext, TimeSeries } from '@grafana/ui';
import { LegendDisplayMode } from '@grafana/schema';

declare global {
  interface Window {
    dashboard: any; // as committed
    answers: Record<string, any[]>; // series by expression, as Prometheus' query_range gives them
    theme: 'light' | 'dark';
  }
}

const theme = createTheme({ colors: { mode: window.theme } });

const legend = (format: string, labels: Record<string, string>) =>
  format.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');

function frames(panel: any): DataFrame[] {
  const defaults = panel.fieldConfig?.defaults ?? {};
  const found: DataFrame[] = panel.targets.flatMap((target: any) =>
    (window.answers[target.expr] ?? []).map((series: any) => {
      const displayName = legend(target.legendFormat, series.metric);
      return toDataFrame({
        refId: target.refId,
        fields: [
          { name: 'time', type: FieldType.time, values: series.values.map((v: any) => v[0] * 1000) },
          {
            name: displayName, type: FieldType.number, values: series.values.map((v: any) => Number(v[1])),
            config: { ...defaults, custom: defaults.custom ?? {}, displayName },
          },
        ],
      });
    }));
  const colours = theme.visualization.palette;
  found.forEach((frame, i) => {
    const fixedColor = theme.visualization.getColorByName(colours[i % colours.length]);
    frame.fields[1].config.color = { mode: FieldColorModeId.Fixed, fixedColor };
  });
  return applyFieldOverrides({
    data: found, theme, timeZone: 'utc', replaceVariables: (text) => text,
    fieldConfig: { defaults, overrides: [] },
  });
}

const times: number[] = Object.values(window.answers).flat().flatMap((series) => series.values.map((v: any) => v[0] * 1000));
const from = dateTime(times.reduce((a, b) => Math.min(a, b), Infinity)), to = dateTime(times.reduce((a, b) => Math.max(a, b), 0));
const timeRange: TimeRange = { from, to, raw: { from, to } }; // one for all panels, as on a dashboard

function Body({ panel, width, height }: { panel: any; width: number; height: number }) {
  const data = frames(panel);
  if (!data.length) return <div>no data</div>;
  if (panel.type === 'stat') {
    const each = width / data.length;
    return (
      <div style={{ display: 'flex' }}>
        {data.map((frame, i) => {
          const field = frame.fields[1];
          const value = (field.display ?? getDisplayProcessor({ field, theme }))(field.values[field.values.length - 1]);
          return (
            <BigValue key={i} theme={theme} width={each} height={height} colorMode={BigValueColorMode.Value}
              graphMode={BigValueGraphMode.None} value={{ ...value, title: field.config.displayName }} />
          );
        })}
      </div>
    );
  }
  return (
    <TimeSeries frames={data} timeRange={timeRange} timeZone="utc" width={width} height={height}
      legend={{ displayMode: LegendDisplayMode.List, placement: 'bottom', showLegend: true, calcs: [] }} />
  );
}

function Page() {
  return (
    <ThemeContext.Provider value={theme}>
      <GlobalStyles />
      <div style={{ display: 'flex', flexWrap: 'wrap', gap: 8, padding: 8, background: theme.colors.background.canvas, width: 1400 }}>
        {window.dashboard.panels.map((panel: any, i: number) => (
          <PanelChrome key={i} title={panel.title} width={(1384 / 24) * panel.gridPos.w - 8} height={panel.gridPos.h * 30}>
            {(width, height) => <Body panel={panel} width={width} height={height} />}
          </PanelChrome>
        ))}
      </div>
    </ThemeContext.Provider>
  );
}

createRoot(document.getElementById('root')!).render(<Page />);
